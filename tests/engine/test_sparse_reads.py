"""Policies that keep everything and read some blocks: each head reads the right ones, nothing is freed."""

from __future__ import annotations

import pytest
import tiny
import torch
from checking import GREEDY, check_roomy, check_shadow, check_sibling, logprobs, tokens
from settings import small
from sparse_shadow import SparseShadow

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError

FAMILIES = [family for family in tiny.FAMILIES if family != "mistral"]


def quest(budget: int = 40, **fields) -> CompressionConfig:
    return small("quest", budget=budget, **{"sinks": 2, "recent": 6, **fields})


def check_sparse(llm, config, monkeypatch, params=GREEDY, lengths=(70, 9, 33)):
    shadow, outputs = check_shadow(llm, config, monkeypatch, params, lengths, SparseShadow)
    assert shadow.sparse_rows > 0
    return shadow, outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_each_head_reads_the_blocks_with_the_highest_bounds(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow, outputs = check_sparse(llm, quest(), monkeypatch)
    assert shadow.most_read == 40
    for out in outputs:
        m = out.metrics
        assert (m.tokens_evicted, m.blocks_freed, m.compactions, m.reclaim_efficiency) == (0, 0, 0, None)
    windows = sum(window.most_blocks(70, 32, 8) for window in llm.engine.groups.windows)
    assert 0 <= outputs[0].metrics.peak_blocks - -(-(70 + 40 - 1) // 8) <= windows


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek-v3"])
def test_native_kernels(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, max_num_batched_tokens=64, kernels="native")
    shadow, _ = check_sparse(llm, quest(64), monkeypatch, lengths=(100, 60, 40))
    assert shadow.most_read == 64


def test_different_settings_and_plain_neighbours_in_one_step(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    check_sparse(llm, [quest(40), None, quest(56, recent=12, sinks=9)], monkeypatch, lengths=(70, 60, 80))


def test_a_budget_above_the_length_changes_no_bit(make_llm):
    check_roomy(make_llm, quest(96))


def test_reading_all_blocks_but_one_differs_from_reading_all(make_llm):
    """The budget has an effect: one block less read, and logits change."""
    prompts = tiny.prompts((60,), seed=1)
    llm = make_llm(enable_prefix_caching=False, block_size=8)
    plain, sparse = llm.generate(prompts, GREEDY), llm.generate(prompts, GREEDY, quest(56))
    assert logprobs(sparse)[0][0] == logprobs(plain)[0][0]
    assert logprobs(sparse)[0][1:] != logprobs(plain)[0][1:]


def test_a_prefix_hit_is_exact_and_digested_too(make_llm):
    prompt = tiny.prompts((64,), seed=9)
    config = quest()
    llm = make_llm(block_size=8)
    cold = llm.generate(prompt, GREEDY, config)
    warm = llm.generate(prompt, GREEDY, config)
    assert warm[0].metrics.num_cached_tokens == 56
    assert tokens(warm) == tokens(cold)
    torch.testing.assert_close(torch.tensor(logprobs(warm)), torch.tensor(logprobs(cold)), atol=1e-5, rtol=0)


def test_siblings_of_a_sparse_reader_do_not_notice(make_llm):
    check_sibling(make_llm, quest())


def test_forks_and_preemption(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, num_blocks=30, max_num_batched_tokens=32)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=40, seed=1, ignore_eos=True)
    _, outputs = check_sparse(llm, quest(), monkeypatch, params, lengths=(30, 40))
    assert sum(out.metrics.preemptions for out in outputs) > 0
    assert not llm.engine.signals.digests.tensor.numel()


@pytest.mark.parametrize("pieces", [1 << 24, 1])
def test_scoring_a_continuation_reads_as_generating_it_did(pieces, make_llm, monkeypatch):
    """Scoring takes all tokens after the prompt at once, each with its own blocks."""
    monkeypatch.setattr("kvreclaim.engine.attend.reads.MAX_ELEMENTS", pieces)
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    prompts = tiny.prompts((60, 25), seed=14)
    outputs = llm.generate(prompts, GREEDY, quest())
    scored = llm.score(prompts, tokens(outputs), quest())
    assert [s.predicted for s in scored] == tokens(outputs)
    torch.testing.assert_close(
        torch.tensor([s.logprobs for s in scored]), torch.tensor(logprobs(outputs)), atol=1e-4, rtol=0
    )


def test_what_cannot_be_served_is_refused(make_llm):
    with pytest.raises(InvalidArgumentError, match="recent tokens may take 32; raise the budget to 32"):
        make_llm(block_size=16).generate(tiny.prompts((20,)), GREEDY, quest(31, recent=1))
    with pytest.raises(InvalidArgumentError, match=r"reads some blocks per head, .* a sliding window"):
        make_llm("mistral").generate(tiny.prompts((20,)), GREEDY, quest())
    with pytest.raises(InvalidArgumentError, match="segments"):
        quest().__class__("segments(quest)")
