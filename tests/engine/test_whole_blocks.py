"""Policies that drop whole blocks: nothing moves, no byte is copied, every block that goes is freed."""

from __future__ import annotations

import odd_policies
import pytest
import tiny
import torch
from checking import GREEDY, check_forks, check_scoring, check_shadow, check_sibling
from settings import assert_idle, small
from shadow import Shadow

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    odd_policies.register(monkeypatch)


def block_policy(**fields) -> CompressionConfig:
    return small("block-norm", **{"budget": 32, "recent": 6, **fields})


@pytest.mark.parametrize("policy", ["block-norm", "paged_eviction"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "mistral"])
def test_attends_exactly_the_blocks_that_stay(family, policy, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow, outputs = check_shadow(llm, small(policy, budget=32, recent=6), monkeypatch, GREEDY)
    assert outputs[0].metrics.compactions >= 4
    assert shadow.num_passes == sum(out.metrics.compactions for out in outputs)


def test_native_kernels_attend_the_same_blocks(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=16, max_num_batched_tokens=32, kernels="native")
    _, outputs = check_shadow(llm, block_policy(budget=64), monkeypatch, GREEDY, lengths=(100, 40))
    assert outputs[0].metrics.compactions >= 3


@pytest.mark.parametrize("interval", [1, 8, 24])
def test_every_block_dropped_comes_back_and_the_budget_holds(interval, make_llm):
    llm = make_llm(block_size=8, max_num_batched_tokens=32)
    (out,) = llm.generate(tiny.prompts((100,), seed=2), GREEDY, block_policy(interval=interval))
    m = out.metrics
    kept = m.num_prompt_tokens + m.num_generated_tokens - 1 - m.tokens_evicted
    assert m.tokens_evicted % 8 == 0
    assert m.blocks_freed == m.tokens_evicted // 8 == m.blocks_perfect
    assert m.reclaim_efficiency == 1.0
    assert 32 - 8 < kept < 32 + interval
    assert m.peak_blocks <= (32 + max(interval, 32)) // 8 + 1


def test_no_byte_of_the_cache_changes(make_llm, monkeypatch):
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    run, cache, passes = llm.engine.compression.run, llm.engine.cache, []

    def checked_run(jobs):
        before = cache.k.clone(), cache.v.clone()
        outcomes = run(jobs)
        assert torch.equal(cache.k, before[0])
        assert torch.equal(cache.v, before[1])
        passes.extend(job.seq.seq_id for job in jobs)
        return outcomes

    monkeypatch.setattr(llm.engine.compression, "run", checked_run)
    llm.generate(tiny.prompts((90,), seed=2), GREEDY, block_policy())
    assert len(passes) >= 5


def test_the_sinks_and_recent_tokens_stay_and_the_lowest_blocks_go(make_llm, monkeypatch):
    """early-first would keep the earliest blocks: the newest ones go, but for those of recent tokens."""
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=128)
    shadow = Shadow(llm, monkeypatch)
    one = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    llm.generate(tiny.prompts((60,), seed=3), one, small("early-first", budget=32, recent=6))
    (history,) = shadow.histories.values()
    assert history.live[0, 0].tolist() == [*range(16), *range(48, 61)]


def test_a_protected_prompt_goes_last(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow = Shadow(llm, monkeypatch)
    config = block_policy(budget=48, protect_prompt=True)
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    (out,) = llm.generate(tiny.prompts((25,), seed=3), params, config)
    assert out.metrics.compactions >= 2
    (history,) = shadow.histories.values()
    assert (history.live[..., :25] == torch.arange(25)).all()
    assert shadow.worst <= 1e-5


@pytest.mark.parametrize(("kernels", "block_size"), [("reference", 8), ("native", 16)])
def test_a_shared_prefix_is_dropped_without_a_sibling_noticing(kernels, block_size, make_llm):
    config = block_policy(budget=48, interval=16)
    metrics = check_sibling(make_llm, config, block_size=block_size, kernels=kernels)
    assert metrics.compactions > 0
    assert metrics.blocks_freed < metrics.blocks_perfect, "no shared block was dropped"


def test_preemption_and_forks_change_nothing(make_llm):
    check_forks(make_llm, block_policy(budget=40, interval=16), num_blocks=13)


def test_scoring_follows_generation(make_llm):
    check_scoring(make_llm, block_policy())


def test_a_budget_too_small_for_whole_blocks_is_refused(make_llm):
    llm = make_llm(block_size=16)
    config = small("block-norm")
    with pytest.raises(InvalidArgumentError, match="recent tokens may take 39; raise the budget to 39"):
        llm.generate(tiny.prompts((20,)), GREEDY, config)
    assert_idle(llm)
    assert llm.generate(tiny.prompts((60,)), GREEDY, small("block-norm", budget=39))[0].error is None


def test_a_mode_has_no_say(make_llm):
    with pytest.raises(InvalidArgumentError, match="policy block-norm decides itself"):
        block_policy(mode="per_layer_head")
    block_policy(mode="union")
