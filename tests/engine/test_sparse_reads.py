"""Policies that keep everything and read some blocks: each head reads the right ones, nothing is freed."""

from __future__ import annotations

import pytest
import tiny
import torch
from settings import assert_idle, small
from sparse_shadow import SparseShadow

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError

GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=0)
FAMILIES = [family for family in tiny.FAMILIES if family != "mistral"]


def tokens(outputs):
    return [output.token_ids for out in outputs for output in out.outputs]


def logprobs(outputs):
    return [[next(iter(step.values())).logprob for step in out.outputs[0].logprobs] for out in outputs]


def quest(budget: int = 40, **fields) -> CompressionConfig:
    return small("quest", budget=budget, **{"sinks": 2, "recent": 6, **fields})


def check_shadow(llm, config, monkeypatch, params=GREEDY, lengths=(70, 9, 33)):
    shadow = SparseShadow(llm, monkeypatch)
    outputs = llm.generate(tiny.prompts(lengths, seed=3), params, config)
    assert [out.error for out in outputs] == [None] * len(lengths)
    assert shadow.worst <= 1e-5, f"attention is off by {shadow.worst:.2e} in {shadow.num_calls} calls"
    assert shadow.sparse_rows > 0
    assert_idle(llm)
    return shadow, outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_each_head_reads_the_blocks_with_the_highest_bounds(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow, outputs = check_shadow(llm, quest(), monkeypatch)
    assert shadow.most_read == 40
    for out in outputs:
        m = out.metrics
        assert (m.tokens_evicted, m.blocks_freed, m.compactions, m.reclaim_efficiency) == (0, 0, 0, None)
    windows = sum(window.most_blocks(70, 32, 8) for window in llm.engine.groups.windows)
    assert 0 <= outputs[0].metrics.peak_blocks - -(-(70 + 50 - 1) // 8) <= windows


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek-v3"])
def test_native_kernels(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, max_num_batched_tokens=64, kernels="native")
    shadow, _ = check_shadow(llm, quest(64), monkeypatch, lengths=(100, 60, 40))
    assert shadow.most_read == 64


def test_different_settings_and_plain_neighbours_in_one_step(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    check_shadow(llm, [quest(40), None, quest(56, recent=12, sinks=9)], monkeypatch, lengths=(70, 60, 80))


def test_a_budget_above_the_length_changes_no_bit(make_llm):
    prompts = tiny.prompts((40, 7, 21), seed=1)
    llm = make_llm(enable_prefix_caching=False)
    plain = llm.generate(prompts, GREEDY)
    roomy = llm.generate(prompts, GREEDY, quest(96))
    assert tokens(roomy) == tokens(plain)
    assert logprobs(roomy) == logprobs(plain)


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
    shared = tiny.prompts((64,), seed=9)[0]
    prompts = [shared + tail for tail in tiny.prompts((6, 6), seed=10)]
    results = []
    for neighbour in (None, quest()):
        llm = make_llm(block_size=8, max_num_batched_tokens=128)
        llm.generate(shared, SamplingParams(temperature=0.0, max_tokens=1))
        results.append(llm.generate(prompts, GREEDY, [None, neighbour]))
        assert_idle(llm)
    assert tokens(results[0][:1]) == tokens(results[1][:1])
    assert logprobs(results[0][:1]) == logprobs(results[1][:1])


def test_forks_and_preemption(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, num_blocks=30, max_num_batched_tokens=32)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=40, seed=1, ignore_eos=True)
    _, outputs = check_shadow(llm, quest(), monkeypatch, params, lengths=(30, 40))
    assert sum(out.metrics.preemptions for out in outputs) > 0
    assert not llm.engine.signals.digests.tensor.numel()


def test_a_preempted_request_gives_the_same_tokens(make_llm):
    prompts = tiny.prompts((40, 30, 20), seed=7)
    calm = make_llm(block_size=8, max_num_batched_tokens=32).generate(prompts, GREEDY, quest())
    tight = make_llm(block_size=8, num_blocks=20, max_num_batched_tokens=32)
    crowded = tight.generate(prompts, GREEDY, quest())
    assert sum(out.metrics.preemptions for out in crowded) > 0
    assert tokens(crowded) == tokens(calm)
    assert_idle(tight)


@pytest.mark.parametrize("pieces", [1 << 24, 1])
def test_scoring_a_continuation_reads_as_generating_it_did(pieces, make_llm, monkeypatch):
    """In one go, all tokens after the prompt at once, each with its own blocks."""
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
    with pytest.raises(InvalidArgumentError, match="evict-only"):
        quest().__class__("evict-only(quest)")
