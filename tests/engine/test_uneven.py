"""Heads that keep unequal numbers of tokens: real blocks come free, and each head attends to its own set."""

from __future__ import annotations

import numpy as np
import odd_policies
import pytest
import tiny
import torch
from checking import (
    GREEDY,
    check_preemption,
    check_roomy,
    check_scoring,
    check_shadow,
    check_sibling,
    check_written_blocks,
    logprobs,
    tokens,
)
from settings import small
from shadow import Shadow

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

POLICIES = ("head-norm", "head-mixture")
SHIPPED = ("ada_kv(snapkv(window=2),alpha=0)", "pyramidkv(snapkv(window=8))", "pyramidkv(query_mixture)")
FAMILIES = [family for family in tiny.FAMILIES if family != "mistral"]


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    odd_policies.register(monkeypatch)


def heads(policy: str = "head-norm", **fields) -> CompressionConfig:
    return small(policy, **{"budget": 32, **fields})


@pytest.mark.parametrize("interval", [8, 13])
@pytest.mark.parametrize("policy", [*POLICIES, *SHIPPED])
def test_each_head_attends_exactly_to_what_it_kept(policy, interval, make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow, outputs = check_shadow(llm, heads(policy, interval=interval), monkeypatch, GREEDY)
    assert outputs[0].metrics.compactions >= 4
    assert shadow.num_passes == sum(out.metrics.compactions for out in outputs)
    sizes = {len(kept) for history in shadow.histories.values() for rows in history.heads for kept in rows}
    assert len(sizes) > 2, "all heads kept the same number"


@pytest.mark.parametrize("budget", [1, 20])
@pytest.mark.parametrize("policy", ["shares(surrogate)", "shares(surrogate,by=static)", *SHIPPED])
def test_a_head_keeps_a_block_where_no_token_is_protected(policy, budget, make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    config = heads(policy, budget=budget, sinks=0, recent=0)
    shadow, outputs = check_shadow(llm, config, monkeypatch, GREEDY)
    assert outputs[0].metrics.compactions >= 4
    for history in shadow.histories.values():
        assert min(len(kept) for rows in history.heads for kept in rows) >= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_without_windows(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    _, outputs = check_shadow(llm, heads("head-norm"), monkeypatch, GREEDY)
    assert outputs[0].metrics.compactions >= 4


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek-v3"])
def test_native_kernels(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, max_num_batched_tokens=32, kernels="native")
    _, outputs = check_shadow(llm, heads("head-norm", budget=48, interval=16), monkeypatch, GREEDY)
    assert outputs[0].metrics.compactions >= 2


@pytest.mark.parametrize(("block_size", "interval"), [(8, 8), (16, 16), (16, 24), (32, 64)])
def test_real_blocks_come_free(block_size, interval, make_llm):
    llm = make_llm(block_size=block_size, max_num_batched_tokens=128)
    held = []
    config = heads(budget=64, interval=interval)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    (out,) = llm.generate(
        tiny.prompts((100,), seed=2), params, config, on_step=lambda step: held.append(step.blocks_in_use)
    )
    m = out.metrics
    kept = m.num_prompt_tokens + m.num_generated_tokens - 1 - m.tokens_evicted
    assert m.compactions >= 1
    assert m.blocks_freed == m.blocks_perfect > 0
    assert 64 <= kept <= 64 + interval
    assert max(held[1:-1]) <= -(-(64 + interval) // block_size)
    assert m.tokens_lost_to_rounding > 0


def test_heads_hold_whole_blocks_after_a_pass_and_share_them_all(make_llm, monkeypatch):
    llm = make_llm(block_size=8, max_num_batched_tokens=32)
    way, seen = llm.engine.compression.methods[EvictionMethod.CELLS], []
    apply = way.apply

    def watched(job, choice):
        done = apply(job, choice)
        cells, table = job.seq.state.cells, llm.engine.memory.table(job.seq.seq_id)
        used = np.concatenate([cells.table[at][: cells.counts[at]] for at in np.ndindex(cells.counts.shape)])
        assert len(np.unique(used)) == len(used) == 2 * 2 * 4
        assert table.physical_len == 32
        assert len(table.block_ids) == 4
        assert cells.counts.sum() == 2 * 2 * 4
        assert {len(slots) % 8 for rows in done.kept for slots in rows} == {0}
        seen.append(cells.counts.copy())
        return done

    monkeypatch.setattr(way, "apply", watched)
    llm.generate(tiny.prompts((70,), seed=3), GREEDY, heads())
    assert len(seen) >= 5
    assert any(counts.min() < counts.max() for counts in seen)


def test_sinks_recent_tokens_and_a_protected_prompt_stay_in_every_head(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow, outputs = check_shadow(
        llm, heads(budget=40, protect_prompt=True, interval=16), monkeypatch, GREEDY, lengths=(21,)
    )
    assert outputs[0].metrics.compactions >= 1
    (history,) = shadow.histories.values()
    for rows in history.heads:
        for kept in rows:
            assert kept[:21].tolist() == list(range(21))


def test_a_protected_prompt_longer_than_the_budget_outranks_answers(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow = Shadow(llm, monkeypatch)
    way, drops = llm.engine.compression.methods[EvictionMethod.CELLS], []
    choose = way.choose

    def watched(jobs):
        (history,) = shadow.histories.values()
        before = [old for layer in range(2) for old in history.attended(layer)]
        [(choice, positions)] = choose(jobs)
        for old, kept in zip(before, [kept for rows in choice.kept for kept in rows], strict=True):
            gone = set(range(len(old))) - set(kept.tolist())
            assert not gone & {0, 1}
            assert not gone & set(range(len(old) - 8, len(old)))
            prompt_gone = any(old[slot] < 70 for slot in gone)
            answers_left = [slot for slot in kept.tolist() if old[slot] >= 70 and slot < len(old) - 8]
            assert not (prompt_gone and answers_left), "an answer outranked the prompt"
            drops.append(prompt_gone)
        return [(choice, positions)]

    monkeypatch.setattr(way, "choose", watched)
    llm.generate(tiny.prompts((70,), seed=3), GREEDY, heads(protect_prompt=True))
    assert shadow.worst <= 1e-5
    assert any(drops)
    assert not all(drops)


@pytest.mark.parametrize("policy", POLICIES)
def test_forked_outputs_and_preemption(policy, make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, num_blocks=18, max_num_batched_tokens=32)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=40, seed=1, ignore_eos=True)
    _, outputs = check_shadow(llm, heads(policy), monkeypatch, params, lengths=(30, 40))
    assert sum(out.metrics.preemptions for out in outputs) > 0
    assert all(len(output.token_ids) == 40 for out in outputs for output in out.outputs)


@pytest.mark.parametrize("policy", [*POLICIES, *SHIPPED])
def test_a_preempted_request_gives_the_same_tokens(policy, make_llm):
    check_preemption(make_llm, heads(policy, interval=16), num_blocks=30)


@pytest.mark.parametrize(("kernels", "block_size"), [("reference", 8), ("native", 16)])
def test_siblings_that_share_the_prefix_do_not_notice(kernels, block_size, make_llm):
    metrics = check_sibling(make_llm, heads(interval=16), block_size=block_size, kernels=kernels)
    assert metrics.compactions > 0


def test_no_block_that_another_may_read_is_written(make_llm, monkeypatch):
    check_written_blocks(make_llm, heads(), EvictionMethod.CELLS, monkeypatch)


def test_the_batch_order_and_neighbours_change_nothing(make_llm):
    prompts = tiny.prompts((60, 25, 44), seed=8)
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    configs = [heads(), None, heads("head-mixture")]
    alone = [llm.generate(p, GREEDY, c)[0] for p, c in zip(prompts, configs, strict=True)]
    together = llm.generate(prompts[::-1], GREEDY, configs[::-1])
    assert tokens(together) == tokens(alone[::-1])


@pytest.mark.parametrize("policy", ["head-norm", *SHIPPED])
def test_scoring_follows_generation(policy, make_llm):
    check_scoring(make_llm, heads(policy, interval=16))


def test_equal_counts_choose_what_equal_heads_would(make_llm, monkeypatch):
    """Counts that are all the budget have the outcome of the policy with equal counts."""
    monkeypatch.setattr(
        odd_policies.HeadMixture,
        "counts",
        lambda self, question: torch.full(question.limit.shape, float(question.budget)),
    )
    llm = make_llm(block_size=8, max_num_batched_tokens=32)
    prompts = tiny.prompts((70, 30), seed=5)
    even = llm.generate(prompts, GREEDY, heads("query_mixture"))
    uneven = llm.generate(prompts, GREEDY, heads("head-mixture"))
    assert tokens(uneven) == tokens(even)
    assert all(out.metrics.tokens_lost_to_rounding == 0 for out in uneven)
    torch.testing.assert_close(
        torch.tensor(logprobs(uneven)), torch.tensor(logprobs(even)), atol=1e-5, rtol=0
    )


def test_a_budget_that_is_never_reached_changes_no_bit(make_llm):
    check_roomy(make_llm, heads(budget=208, interval=16))
