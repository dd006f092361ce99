"""Readers of outputs, and checks of any compression: each check runs small engines and compares."""

from __future__ import annotations

import tiny
import torch
from settings import assert_idle
from shadow import Shadow

from kvreclaim import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
LIMITS = {"block_size": 8, "max_num_batched_tokens": 32}


def tokens(outputs):
    return [output.token_ids for out in outputs for output in out.outputs]


def first_tokens(outputs) -> list[list[int]]:
    """The tokens of each request's first output; none has failed."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(outputs):
    return [[next(iter(step.values())).logprob for step in out.outputs[0].logprobs] for out in outputs]


def check_shadow(llm, config, monkeypatch, params, lengths=(70, 9, 33), kind=Shadow, tolerance=1e-5):
    """Check every attention call against the shadow. Returns: the shadow and the outputs."""
    shadow = kind(llm, monkeypatch)
    outputs = llm.generate(tiny.prompts(lengths, seed=3), params, config)
    assert [out.error for out in outputs] == [None] * len(lengths)
    assert shadow.worst <= tolerance, f"attention is off by {shadow.worst:.2e} in {shadow.num_calls} calls"
    assert_idle(llm)
    return shadow, outputs


def check_roomy(make_llm, config):
    """A budget that is never reached changes no bit."""
    prompts = tiny.prompts((40, 7, 21), seed=1)
    llm = make_llm(enable_prefix_caching=False)
    plain, roomy = (llm.generate(prompts, GREEDY, each) for each in (None, config))
    assert tokens(roomy) == tokens(plain)
    assert logprobs(roomy) == logprobs(plain)
    assert all(out.metrics.tokens_evicted == 0 for out in roomy)


def check_sibling(make_llm, config, still=None, *, block_size=8, num_cached=64, **options):
    """A sibling shares prefix blocks; whether the other request compresses changes none of its bits.

    still:      what the other one is compared with
    num_cached: prompt tokens that the other one finds; None: any
    Returns: the metrics of the one that compresses
    """
    shared = tiny.prompts((64,), seed=9)[0]
    prompts = [shared + tail for tail in tiny.prompts((6, 6), seed=10)]
    results = []
    for neighbour in (still, config):
        llm = make_llm(block_size=block_size, **{"max_num_batched_tokens": 128, **options})
        llm.generate(shared, SamplingParams(temperature=0.0, max_tokens=1))
        outputs = llm.generate(prompts, GREEDY, [None, neighbour])
        assert outputs[0].metrics.num_cached_tokens == 64
        assert num_cached is None or outputs[1].metrics.num_cached_tokens == num_cached
        results.append(outputs)
        assert_idle(llm)
    assert tokens(results[0][:1]) == tokens(results[1][:1])
    assert logprobs(results[0][:1]) == logprobs(results[1][:1])
    return results[1][1].metrics


def check_preemption(make_llm, config, num_blocks):
    """Requests that are preempted after they were compressed answer as in a roomy pool."""
    prompts = tiny.prompts((20, 19, 18, 17), seed=7)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (160, 100, 100, 100)]
    configs = [None, *[config] * 3]  # the first one grows and drives the others out
    calm = make_llm(**LIMITS).generate(prompts, params, configs)
    tight = make_llm(num_blocks=num_blocks, **LIMITS)
    crowded = tight.generate(prompts, params, configs)
    assert sum(out.metrics.preemptions for out in crowded) > 0
    passes = sum(out.metrics.compactions for out in crowded)
    assert tight.engine.totals.compactions > passes, "no request was preempted after it was compressed"
    assert tokens(crowded) == tokens(calm)
    assert [out.metrics.tokens_evicted for out in crowded] == [out.metrics.tokens_evicted for out in calm]
    assert_idle(tight)
    return tight


def check_forks(make_llm, config, num_blocks):
    """Three outputs of one prompt, all of them compressing, draw the same with preemptions between."""
    prompt = tiny.prompts((50,), seed=12)[0]
    params = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=40, ignore_eos=True)
    limits = {"block_size": 8, "max_num_batched_tokens": 64}
    roomy = make_llm(**limits).generate(prompt, params, config)
    tight = make_llm(num_blocks=num_blocks, **limits)
    crowded = tight.generate(prompt, params, config)
    assert crowded[0].metrics.preemptions > 0
    assert tokens(crowded) == tokens(roomy)
    assert len(set(map(tuple, tokens(roomy)))) == 3
    assert_idle(tight)


def check_company(make_llm, config):
    """Neighbours, their order and how prompts are cut change nothing."""
    prompts = tiny.prompts((60, 45, 70, 12, 33), seed=8)
    llm = make_llm(block_size=8, max_num_batched_tokens=24, max_num_seqs=3)
    alone = [llm.generate(prompt, GREEDY, config)[0] for prompt in prompts]
    llm.engine.memory.reset_prefix_cache()
    order = [3, 0, 4, 2, 1]
    together = llm.generate([prompts[i] for i in order], GREEDY, config)
    assert tokens(together) == tokens([alone[i] for i in order])


def check_scoring(make_llm, config):
    """score() takes the path that generating took: compressed at the same points, seeing the same."""
    prompts = tiny.prompts((60, 25), seed=14)
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    outputs = llm.generate(prompts, GREEDY, config)
    scored = llm.score(prompts, tokens(outputs), config)
    assert [each.predicted for each in scored] == tokens(outputs)
    torch.testing.assert_close(
        torch.tensor([each.logprobs for each in scored]), torch.tensor(logprobs(outputs)), atol=1e-4, rtol=0
    )


def check_written_blocks(make_llm, config, method, monkeypatch):
    """The bytes of blocks that another may read are the same before and after every pass."""
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    memory, cache = llm.engine.memory, llm.engine.cache
    passes = llm.engine.compression.methods[method]
    choose, apply = passes.choose, passes.apply
    due, watched = [], []

    def noted_choose(jobs):
        due[:] = jobs
        return choose(jobs)

    def checked_apply(job, choice):
        due.remove(job)
        others = {block for later in due for block in later.plan.source_ids}
        held = sorted(others | {b for b in range(memory.pool.num_blocks) if memory.pool.refs[b] > 1})
        before = cache.k[:, held].clone(), cache.v[:, held].clone()
        done = apply(job, choice)
        assert torch.equal(cache.k[:, held], before[0])
        assert torch.equal(cache.v[:, held], before[1])
        watched.append(len(held))
        return done

    monkeypatch.setattr(passes, "choose", noted_choose)
    monkeypatch.setattr(passes, "apply", checked_apply)
    shared = tiny.prompts((64,), seed=9)[0]
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=40, ignore_eos=True)
    llm.generate([shared + tail for tail in tiny.prompts((3, 9), seed=10)], params, config)
    assert sum(watched) > 0
