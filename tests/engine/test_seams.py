"""Seams between features: no lossy, failed or NaN block ever reaches another request."""

from __future__ import annotations

import pytest
import tiny
import torch
from breaking import GREEDY

from kvreclaim import CompressionConfig, SamplingParams

S = 8


def conversation(llm, compression, length=64):
    """A prompt, and the same with the answer that the compression gives: the next turn."""
    prompt = tiny.prompts((100,), seed=31)[0]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    out = llm.generate([prompt], params, compression)[0]
    assert out.error is None
    return prompt, prompt + out.outputs[0].token_ids


def quest():
    return CompressionConfig("quest", budget=32, sinks=4, recent=8)


def test_tokens_computed_under_sparse_reads_are_never_hit(make_llm):
    llm = make_llm(block_size=S)
    prompt, longer = conversation(llm, quest())
    continuation = [5, 6, 7, 8]
    warm = llm.score([longer], [continuation])[0]
    assert warm.metrics.num_cached_tokens == len(prompt) // S * S
    llm.engine.memory.reset_prefix_cache()
    cold = llm.score([longer], [continuation])[0]
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-5)


def test_scored_tokens_under_sparse_reads_are_never_hit(make_llm):
    llm = make_llm(block_size=S)
    prompt, longer = conversation(llm, None)
    llm.engine.memory.reset_prefix_cache()
    llm.score([prompt], [longer[len(prompt) :]], quest())
    assert llm.score([longer], [[5, 6]])[0].metrics.num_cached_tokens <= len(prompt)


def test_sparse_reads_find_no_exact_block_where_they_would_have_read_sparsely(make_llm):
    """After a preemption a sequence is computed again: as before, whatever others have indexed meanwhile."""
    llm = make_llm(block_size=S)
    prompt, longer = conversation(llm, None)
    config = quest()
    scored = llm.score([prompt], [longer[len(prompt) :]], config)[0]
    llm.engine.memory.reset_prefix_cache()
    assert llm.score([prompt], [longer[len(prompt) :]], config)[0].logprobs == pytest.approx(
        scored.logprobs, abs=1e-5
    )


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_a_failed_pass_that_is_run_again_leaves_forks_alone(kernels, make_llm, monkeypatch):
    """In one step a fork copies its tail and the others give way to another tenant, whose sequence takes all
    blocks that are free: the copy's source would be the next one. The pass fails once."""

    def outcome(fail):
        size = 16 if kernels == "native" else S
        llm = make_llm(
            num_blocks=5,
            block_size=size,
            max_num_seqs=4,
            enable_prefix_caching=False,
            kernels=kernels,
            max_model_len=5 * size,
        )
        engine, met = llm.engine, []
        schedule, forward = engine.scheduler.schedule, engine.runner.forward

        def watched():
            plan = schedule()
            if plan.copies and plan.preempted:
                met.append(plan)
            return plan

        def failing(step):
            if fail and met and len(step) > 1:
                met.clear()
                forward(step)
                raise RuntimeError("once")
            return forward(step)

        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "schedule", watched)
            patch.setattr(engine.runner, "forward", failing)
            first, second = tiny.prompts((size + size // 2, 2 * size), seed=3)
            params = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=size, ignore_eos=True)
            requests = [engine.add_request("forks", first, params, tenant="one")]
            while len(engine.scheduler.running) < 3:
                engine.step()
            greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            requests.append(engine.add_request("other", second, greedy, tenant="another"))
            while engine.has_unfinished:
                engine.step()
                engine.memory.check()
        assert bool(met) != fail, "the step in question has to happen"
        assert [request.error for request in requests] == [None, None]
        return [output.token_ids for request in requests for output in request.output().outputs]

    assert outcome(fail=True) == outcome(fail=False)


@pytest.mark.parametrize("chunk", [512, 24])
@pytest.mark.parametrize("times", [1, 2])
def test_what_was_no_number_is_not_cached(chunk, times, make_llm):
    """NaN comes once, or in the retry again; in the only chunk of a prompt, or in its first."""
    llm = make_llm(block_size=S, max_num_batched_tokens=chunk)
    prompt = tiny.prompts((100,), seed=5)[0]
    expected = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    llm.engine.memory.reset_prefix_cache()
    left = [times]

    def poison(module, inputs, out):
        if left[0]:
            left[0] -= 1
            hidden = out[0] if isinstance(out, tuple) else out
            nan = torch.full_like(hidden, float("nan"))
            return (nan, *out[1:]) if isinstance(out, tuple) else nan
        return out

    hook = llm.loaded.model.model.layers[0].register_forward_hook(poison)
    try:
        for _ in range(times):
            assert "not finite" in llm.generate([prompt], GREEDY)[0].error
            assert llm.engine.memory.stats().cached == 0
        again = llm.generate([prompt], GREEDY)[0]
    finally:
        hook.remove()
    assert (again.error, again.metrics.num_cached_tokens) == (None, 0)
    assert again.outputs[0].token_ids == expected


def test_requests_that_arrive_together_are_compressed_at_different_steps(make_llm):
    """Each answers as alone, preempted or not. The first one keeps all: its growth preempts others."""
    prompts = tiny.prompts((30,) * 6, seed=9)
    config = CompressionConfig("knorm", budget=32, interval=24, sinks=2, recent=8)

    def outcome(spread, num_blocks, one_by_one=False):
        llm = make_llm(block_size=S, num_blocks=num_blocks, spread_compression=spread)
        groups = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        outputs, most = [], 0
        for group in groups:
            compressor = llm.compressor(config)
            requests = []
            for i, prompt in enumerate(group):
                whole = prompt is prompts[0]
                params = SamplingParams(temperature=0.0, max_tokens=120 if whole else 60, ignore_eos=True)
                made = None if whole else compressor
                requests.append(llm.engine.add_request(f"r{i}", prompt, params, made))
            while llm.engine.has_unfinished:
                most = max(most, len(llm.engine.step().passes))
            outputs += [request.output().outputs[0].token_ids for request in requests]
        return outputs, most, llm.engine.totals.num_preemptions

    _, most, _ = outcome(False, 200)
    spread, fewer, _ = outcome(True, 200)
    assert (most, fewer < most) == (len(prompts) - 1, True)
    alone, _, _ = outcome(True, 200, one_by_one=True)
    tight, _, preemptions = outcome(True, 24)
    assert spread == alone == tight
    assert preemptions > 0


def test_blocks_that_cannot_be_prepared_end_the_requests_of_the_step(make_llm, monkeypatch):
    """They end rather than compute over whatever the blocks hold."""
    llm = make_llm(block_size=S, max_num_seqs=4)
    engine = llm.engine
    prompts = tiny.prompts((20, 21), seed=6)
    expected = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]
    forks = engine.add_request(
        "forks", prompts[0], SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True)
    )
    other = engine.add_request("other", prompts[1], GREEDY)
    copy, left = engine.backend.copy_blocks, [1]

    def failing(cache, pairs):
        if left[0]:
            left[0] = 0
            raise RuntimeError("no copy")
        copy(cache, pairs)

    monkeypatch.setattr(engine.backend, "copy_blocks", failing)
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
    assert (forks.error, other.error) == ("RuntimeError: no copy",) * 2
    assert engine.memory.stats().in_use == 0
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)] == expected
