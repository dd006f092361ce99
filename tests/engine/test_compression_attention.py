"""Attention over a compressed cache is plain attention over the kept tokens at their original places."""

from __future__ import annotations

import pytest
import tiny
from checking import GREEDY, check_shadow
from settings import EVICTING, small

from kvreclaim import SamplingParams
from kvreclaim.compression.policy import Mode


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("policy", EVICTING)
def test_attends_exactly_the_kept_tokens(policy, mode, make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow, outputs = check_shadow(llm, small(policy, mode=mode), monkeypatch, GREEDY)
    assert outputs[0].metrics.compactions >= 5
    assert shadow.num_passes == sum(out.metrics.compactions for out in outputs)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, max_num_batched_tokens=32)
    _, outputs = check_shadow(llm, small("query_mixture"), monkeypatch, GREEDY)
    assert outputs[0].metrics.compactions >= 5


def test_forked_outputs_and_preemption(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, num_blocks=22, max_num_batched_tokens=32)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=40, seed=1, ignore_eos=True)
    _, outputs = check_shadow(llm, small("query_mixture"), monkeypatch, params, lengths=(30, 40))
    assert all(len(output.token_ids) == 40 for out in outputs for output in out.outputs)
    assert sum(out.metrics.preemptions for out in outputs) > 0


def test_protected_prompt_stays(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    config = small("knorm", budget=40, protect_prompt=True)
    shadow, outputs = check_shadow(llm, config, monkeypatch, GREEDY, lengths=(25,))
    assert outputs[0].metrics.compactions >= 2
    live = next(iter(shadow.histories.values())).live
    assert (live[..., :25] == live.new_tensor(range(25))).all()


def test_newest_tokens_survive_a_protected_prompt_over_budget(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    config = small("knorm", protect_prompt=True)
    shadow, outputs = check_shadow(llm, config, monkeypatch, GREEDY, lengths=(70,))
    last = outputs[0].metrics.num_prompt_tokens + outputs[0].metrics.num_generated_tokens - 1
    live = next(iter(shadow.histories.values())).live
    assert (live[..., -8:] == live.new_tensor(range(last - 8, last))).all()
    assert (live[..., :2] == live.new_tensor([0, 1])).all()
