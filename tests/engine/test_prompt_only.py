"""Policies that compress once, when the prompt has been computed."""

from __future__ import annotations

import odd_policies
import pytest
import tiny
from checking import tokens
from settings import assert_idle, small
from shadow import Shadow

from kvreclaim import SamplingParams
from kvreclaim.errors import RequestTooLongError

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    odd_policies.register(monkeypatch)


@pytest.mark.parametrize("policy", ["prompt-norm", "snapkv(when=prefill,window=8)", "kvzip"])
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_one_pass_at_the_end_of_a_long_prompt_and_none_for_a_short_one(
    kernels, policy, make_llm, monkeypatch
):
    llm = make_llm(enable_prefix_caching=False, max_num_batched_tokens=32, kernels=kernels)
    shadow, lengths = Shadow(llm, monkeypatch), []
    run = llm.engine.compression.run

    def noted_run(jobs):
        lengths.extend((job.seq.num_prompt, job.plan.logical_len, job.plan.num_tokens) for job in jobs)
        return run(jobs)

    monkeypatch.setattr(llm.engine.compression, "run", noted_run)
    outputs = llm.generate(tiny.prompts((150, 20, 24, 25), seed=3), GREEDY, small(policy))
    assert sorted(lengths) == [(25, 25, 25), (150, 150, 150)]
    assert [out.metrics.compactions for out in outputs] == [1, 0, 0, 1]
    assert [out.metrics.tokens_evicted for out in outputs] == [150 - 24, 0, 0, 1]
    assert outputs[0].metrics.blocks_freed == 10 - 2
    assert outputs[0].metrics.peak_blocks == 10
    assert shadow.worst <= 1e-5
    assert_idle(llm)


def test_outputs_share_one_pass(make_llm):
    params = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=30, ignore_eos=True)
    llm = make_llm(block_size=8)
    (out,) = llm.generate(tiny.prompts((50,), seed=2), params, small("prompt-norm"))
    assert out.metrics.compactions == 1
    assert out.metrics.tokens_evicted == 26
    assert_idle(llm)


def test_the_whole_prompt_has_to_fit_and_the_answer_ends_where_the_pool_does(make_llm):
    llm = make_llm(block_size=8, num_blocks=10, max_num_batched_tokens=32)
    config = small("prompt-norm")
    with pytest.raises(RequestTooLongError, match="needs 81 slots, but the pool holds 80"):
        llm.generate(tiny.prompts((81,)), GREEDY, config)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (long,) = llm.generate(tiny.prompts((80,)), params, config)
    # 80 tokens become 24, so 56 more fit; the last token drawn is never computed
    assert long.outputs[0].finish_reason == "length"
    assert len(long.outputs[0].token_ids) == 80 - 24
    assert long.metrics.peak_blocks == 10
    (short,) = llm.generate(tiny.prompts((20,)), params, config)
    assert len(short.outputs[0].token_ids) == 80 - 20
    assert_idle(llm)


def test_preemption_repeats_the_pass_at_the_same_place(make_llm):
    prompts = tiny.prompts((60, 50, 40, 12), seed=7)
    config = small("prompt-norm")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    calm = make_llm(block_size=8, max_num_batched_tokens=32).generate(prompts, params, config)
    tight = make_llm(block_size=8, num_blocks=18, max_num_batched_tokens=32)
    crowded = tight.generate(prompts, params, config)
    assert sum(out.metrics.preemptions for out in crowded) > 0
    assert tight.engine.totals.compactions > 3
    assert tokens(crowded) == tokens(calm)
    assert [out.metrics.compactions for out in crowded] == [1, 1, 1, 0]
    assert_idle(tight)


def test_scoring_compresses_between_prompt_and_continuation(make_llm):
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    prompts = tiny.prompts((60, 25, 10), seed=14)
    outputs = llm.generate(prompts, GREEDY, small("prompt-norm"))
    scored = llm.score(prompts, tokens(outputs), small("prompt-norm"))
    assert [s.predicted for s in scored] == tokens(outputs)
    assert [s.metrics.compactions for s in scored] == [1, 1, 0]


def test_a_prefix_hit_leaves_the_pass_where_it_is(make_llm):
    llm = make_llm(block_size=8)
    prompt = tiny.prompts((64,), seed=9)
    config = small("prompt-norm")
    cold = llm.generate(prompt, GREEDY, config)
    warm = llm.generate(prompt, GREEDY, config)
    assert warm[0].metrics.num_cached_tokens > 0
    assert warm[0].metrics.compactions == 1
    assert tokens(warm) == tokens(cold)
