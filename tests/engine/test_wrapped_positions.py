"""Promises of protect and segments about positions of the text hold in the engine, pass after pass."""

import pytest
import tiny
import torch
from settings import small
from shadow import Shadow

from kvreclaim import SamplingParams
from kvreclaim.compression.policies.protect import Protect
from kvreclaim.compression.policies.segments import Segments

PARAMS = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
SETTINGS = {"budget": 64, "interval": 16, "sinks": 2, "recent": 8}
NUM_PROMPT = 150


def watched(monkeypatch, cls):
    """(logical length, positions [K, T]) of every call of the policy's score."""
    seen, score = [], cls.score

    def watching(self, view):
        seen.append((view.logical_len, view.signals.positions.clone()))
        return score(self, view)

    monkeypatch.setattr(cls, "score", watching)
    return seen


@pytest.mark.parametrize(
    "spec",
    [
        "protect(random, first=5, spans=((40, 60), (100, 103)))",
        "protect(paged_eviction, first=5, spans=((40, 43), (100, 103)))",
        "protect(segments(random), first=5, spans=((40, 60), (100, 103)))",
        "pyramidkv(protect(random, first=5, spans=((40, 60), (100, 103))), beta=2)",
        "shares(protect(random, first=5, spans=((40, 60), (100, 103))), by=static)",
        "shares(protect(random, first=5, spans=((40, 60), (100, 103))))",
        "protect(segments(ada_kv(random)), first=5, spans=((40, 60), (100, 103)))",
    ],
)
def test_protected_tokens_outlive_all_others(spec, make_llm, monkeypatch):
    seen = watched(monkeypatch, Protect)
    llm = make_llm(block_size=8)
    (out,) = llm.generate(tiny.prompts((NUM_PROMPT,), seed=3), PARAMS, small(spec, **SETTINGS))
    assert out.metrics.compactions >= 4
    named = {*range(5), *range(40, 43 if "paged" in spec else 60), *range(100, 103)}
    for logical_len, positions in seen:
        for row in positions.tolist():
            assert row == sorted(set(row))
            assert row[-1] == logical_len - 1
            assert named <= set(row)
    assert any(positions.shape[1] < logical_len for logical_len, positions in seen)


def test_every_segment_keeps_its_share_of_the_places(make_llm, monkeypatch):
    """64 places, 10 of them protected, all others in turns to six segments; then 16 new tokens."""
    seen = watched(monkeypatch, Segments)
    llm = make_llm(block_size=8)
    config = small("segments(random, n=6, share=1)", **SETTINGS)
    (out,) = llm.generate(tiny.prompts((NUM_PROMPT,), seed=3), PARAMS, config)
    assert out.metrics.compactions >= 4
    for logical_len, positions in seen:
        for row in positions:
            assert torch.bincount(row.long() * 6 // logical_len, minlength=6).min() >= 5


def test_each_of_unequal_heads_gets_the_positions_of_its_own_tokens(make_llm, monkeypatch):
    llm, lengths = make_llm(block_size=8, enable_prefix_caching=False), []
    shadow, score = Shadow(llm, monkeypatch), Protect.score

    def checking(self, view):
        (history,) = shadow.histories.values()
        held = history.attended(view.layer)
        for head, positions in enumerate(view.signals.positions, view.first_head):
            assert positions.tolist() == held[head].tolist()
            lengths.append(len(positions))
        return score(self, view)

    monkeypatch.setattr(Protect, "score", checking)
    config = small("pyramidkv(protect(random, first=5), beta=2)", **SETTINGS)
    (out,) = llm.generate(tiny.prompts((NUM_PROMPT,), seed=3), PARAMS, config)
    assert out.metrics.compactions >= 4
    assert len(set(lengths)) > 2
    assert shadow.worst <= 1e-5
