"""Layers with sliding windows beside full ones, in tables of their own."""

from __future__ import annotations

import odd_policies
import pytest
import tiny
from score_shadow import ScoreShadow
from settings import assert_idle, small
from signal_shadow import SignalShadow
from sparse_shadow import SparseShadow

from kvreclaim import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
GROUPED = tiny.GROUPED
POLICIES = (
    "knorm",
    "query_mixture",
    "snapkv(window=3)",
    "tova",
    "h2o",
    "evict-only(knorm)",
    "paged_eviction",
    "ada_kv(snapkv(window=3),alpha=0)",
    "pyramidkv(query_mixture)",
    "quest",
    "kvzap",
    "segments(keydiff)",
)


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    odd_policies.register(monkeypatch)


def deep(family: str) -> dict[str, int]:
    """Layers enough for several groups of windows."""
    return {"num_hidden_layers": 8 if family == "gemma3" else 4}


class EveryShadow(SparseShadow, ScoreShadow, SignalShadow):
    """All that the shadows look at."""


@pytest.mark.parametrize("family", GROUPED)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_over_the_layers_with_full_attention(family, policy, make_llm, monkeypatch):
    llm = make_llm(family, block_size=8, max_num_batched_tokens=32)
    assert llm.engine.groups.windows
    shadow = EveryShadow(llm, monkeypatch)
    config = small(policy, budget=40, interval=8)
    outputs = llm.generate(tiny.prompts((70, 9, 33), seed=3), GREEDY, config)
    assert [out.error for out in outputs] == [None] * 3
    assert shadow.worst <= 1e-5, f"attention is off by {shadow.worst:.2e} in {shadow.num_calls} calls"
    assert not shadow.wrong
    assert_idle(llm)
    if policy != "quest":
        assert outputs[0].metrics.compactions >= 2
        assert outputs[0].metrics.blocks_freed > 0 or policy.startswith("evict-only")
