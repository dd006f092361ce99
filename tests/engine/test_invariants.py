"""Invariants of every policy: memory given back, neighbours untouched, results reproducible."""

from __future__ import annotations

import pytest
import tiny
import torch
from checking import (
    GREEDY,
    check_company,
    check_forks,
    check_preemption,
    check_roomy,
    check_scoring,
    check_sibling,
    check_written_blocks,
    logprobs,
    tokens,
)
from settings import EVICTING, MOVING, small, takes_every_hit

from kvreclaim import SamplingParams
from kvreclaim.compression.policy import Mode
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


def used_blocks(num_tokens, block_size):
    return -(-num_tokens // block_size)


@pytest.mark.parametrize("policy", EVICTING)
def test_a_budget_that_is_never_reached_changes_no_bit(policy, make_llm):
    check_roomy(make_llm, small(policy, budget=200))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_compaction_frees_every_block_that_can_be_freed(block_size, mode, make_llm):
    llm = make_llm(block_size=block_size, max_num_batched_tokens=128, spread_compression=False)
    config = small("knorm", budget=64, interval=64, mode=mode)
    params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    (out,) = llm.generate(tiny.prompts((100,), seed=2), params, config)
    m = out.metrics
    # the last token drawn is never computed; the passes end at 100, 164 - and so on, 64 apart
    num_computed = m.num_prompt_tokens + m.num_generated_tokens - 1
    kept = num_computed - m.tokens_evicted
    at_last_pass = m.tokens_evicted + 64
    assert m.compactions == 1 + (num_computed - 100) // 64 - (num_computed < 128)
    expected = used_blocks(at_last_pass, block_size) - used_blocks(64, block_size)
    assert m.blocks_freed == expected
    assert m.reclaim_efficiency == 1.0
    assert used_blocks(kept, block_size) <= m.peak_blocks <= used_blocks(128, block_size)
    assert m.final_blocks == used_blocks(kept, block_size)


@pytest.mark.parametrize("policy", MOVING)
def test_every_moving_policy_reclaims_all(policy, make_llm):
    outputs = make_llm().generate(tiny.prompts((90, 50), seed=2), GREEDY, small(policy, interval=16))
    for out in outputs:
        assert out.metrics.compactions >= 2
        assert out.metrics.reclaim_efficiency == 1.0
        assert out.metrics.blocks_freed > 0


@pytest.mark.parametrize("policy", EVICTING)
def test_a_long_prompt_needs_budget_plus_chunk_slots(policy, make_llm):
    prompt = tiny.prompts((300,), seed=6)
    num_blocks = used_blocks(24 + 32, 8)
    llm = make_llm(block_size=8, num_blocks=num_blocks, max_num_batched_tokens=32)
    (out,) = llm.generate(prompt, GREEDY, small(policy))
    assert out.outputs[0].finish_reason == "length"
    assert len(out.outputs[0].token_ids) == 40
    assert out.metrics.peak_blocks <= num_blocks
    roomy = make_llm(block_size=8, max_num_batched_tokens=32)
    assert tokens(roomy.generate(prompt, GREEDY, small(policy))) == tokens([out])


@pytest.mark.parametrize("policy", EVICTING)
def test_a_preempted_compressed_request_gives_the_same_tokens(policy, make_llm):
    check_preemption(make_llm, small(policy, interval=16), num_blocks=26)


def test_admission_leaves_room_for_growth_that_is_known(make_llm):
    """Compressed sequences peak at budget + interval: no request is admitted into their last blocks."""
    llm = make_llm(block_size=8, num_blocks=17, max_num_batched_tokens=32)
    running = []
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    outputs = llm.generate(
        tiny.prompts((20, 19, 18, 17, 16), seed=7),
        params,
        small("knorm", interval=16),
        on_step=lambda step: running.append(step.num_running),
    )
    assert [out.metrics.preemptions for out in outputs] == [0] * 5
    assert max(running) == 17 // used_blocks(24 + 16, 8)


@pytest.mark.parametrize("policy", EVICTING)
def test_company_changes_nothing(policy, make_llm):
    check_company(make_llm, small(policy))


@pytest.mark.parametrize("policy", MOVING)
def test_siblings_of_a_compressed_request_do_not_notice(policy, make_llm):
    """A policy that has to see its prompt computed makes steps of other sizes than no policy, which shows in
    the last bits of all rows of a step: it is compared with itself under a budget that is never reached, in
    steps of no more rows than are computed as each would be alone."""
    fields, hits = {"budget": 40, "interval": 16}, takes_every_hit(policy)
    still = None if hits else small(policy, budget=1000, interval=16)
    options = {"num_cached": 64} if hits else {"num_cached": None, "max_num_batched_tokens": 32}
    metrics = check_sibling(make_llm, small(policy, **fields), still, **options)
    assert metrics.compactions > 0


@pytest.mark.parametrize("policy", MOVING)
def test_compressing_never_writes_a_block_that_another_may_read(policy, make_llm, monkeypatch):
    check_written_blocks(make_llm, small(policy), EvictionMethod.COMPACT, monkeypatch)


def test_prefix_hits_after_compression_are_exact(make_llm):
    """Blocks that a compressed request left in the index are those of full attention."""
    prompts = tiny.prompts((64, 90), seed=11)
    fresh = make_llm(block_size=8, enable_prefix_caching=False).generate(prompts, GREEDY)
    llm = make_llm(block_size=8)
    llm.generate(prompts, GREEDY, small("knorm", budget=40, interval=16))
    again = llm.generate(prompts, GREEDY)
    assert [out.metrics.num_cached_tokens for out in again] == [56, 88]
    assert tokens(again) == tokens(fresh)
    torch.testing.assert_close(
        torch.tensor(logprobs(again)), torch.tensor(logprobs(fresh)), atol=1e-5, rtol=0
    )


def test_fork_then_compress_one(make_llm):
    check_forks(make_llm, small("query_mixture"), num_blocks=11)


@pytest.mark.parametrize("policy", EVICTING)
def test_scoring_ones_own_output_predicts_it(policy, make_llm):
    check_scoring(make_llm, small(policy))
