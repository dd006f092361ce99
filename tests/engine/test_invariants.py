"""What must hold whatever the policy: memory given back, neighbours untouched, results reproducible."""

from __future__ import annotations

import pytest
import tiny
import torch
from settings import EVICTING, MOVING, small, takes_every_hit

from kvreclaim import SamplingParams
from kvreclaim.compression.policy import Mode
from kvreclaim.engine.request.request import Scheduled
from kvreclaim.ops import reference as ops
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)


def tokens(outputs):
    return [out.outputs[0].token_ids for out in outputs]


def logprobs(outputs):
    return [[next(iter(step.values())).logprob for step in out.outputs[0].logprobs] for out in outputs]


def used_blocks(num_tokens, block_size):
    return -(-num_tokens // block_size)


@pytest.mark.parametrize("policy", EVICTING)
def test_a_budget_that_is_never_reached_changes_no_bit(policy, make_llm):
    prompts = tiny.prompts((40, 7, 21), seed=1)
    llm = make_llm(enable_prefix_caching=False)
    plain = llm.generate(prompts, GREEDY)
    roomy = llm.generate(prompts, GREEDY, small(policy, budget=200))
    assert tokens(roomy) == tokens(plain)
    assert logprobs(roomy) == logprobs(plain)
    assert all(out.metrics.tokens_evicted == 0 for out in roomy)


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


@pytest.mark.parametrize("policy", MOVING)
def test_every_moving_policy_reclaims_all(policy, make_llm):
    outputs = make_llm().generate(tiny.prompts((90, 50), seed=2), GREEDY, small(policy, interval=16))
    for out in outputs:
        assert out.metrics.compactions >= 2
        assert out.metrics.reclaim_efficiency == 1.0
        assert out.metrics.blocks_freed > 0


def test_evicting_without_moving_frees_almost_nothing(make_llm):
    """Keeping r of the tokens at random empties a block of S slots with probability (1 - r)^S, if one
    kept set serves all heads, and next to never if each head has its own."""
    llm = make_llm(block_size=16, num_blocks=400, max_num_batched_tokens=512)
    prompt = tiny.prompts((480,), seed=4)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    common = {"budget": 120, "interval": 8, "sinks": 2, "recent": 8}
    for mode, bound in (("union", 0.35), ("per_layer_head", 0.05)):
        (stuck,) = llm.generate(prompt, params, small("evict-only(knorm)", mode=mode, **common))
        (moved,) = llm.generate(prompt, params, small("knorm", mode=mode, **common))
        assert stuck.metrics.tokens_evicted == moved.metrics.tokens_evicted == 360
        assert stuck.metrics.blocks_perfect == moved.metrics.blocks_freed == 30 - 8
        assert stuck.metrics.reclaim_efficiency <= bound
        assert stuck.metrics.peak_blocks >= 30


def test_evict_only_makes_the_choice_of_the_policy_it_wraps(make_llm):
    prompts = tiny.prompts((70, 30), seed=5)
    llm = make_llm(enable_prefix_caching=False, max_num_batched_tokens=32)
    moved = llm.generate(prompts, GREEDY, small("query_mixture"))
    stuck = llm.generate(prompts, GREEDY, small("evict-only"))
    assert tokens(stuck) == tokens(moved)
    torch.testing.assert_close(
        torch.tensor(logprobs(stuck)), torch.tensor(logprobs(moved)), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("policy", EVICTING)
def test_a_long_prompt_needs_budget_plus_chunk_slots(policy, make_llm):
    prompt = tiny.prompts((300,), seed=6)
    num_blocks = used_blocks(300 + 40, 8) if policy == "evict-only" else used_blocks(24 + 32, 8)
    llm = make_llm(block_size=8, num_blocks=num_blocks, max_num_batched_tokens=32)
    (out,) = llm.generate(prompt, GREEDY, small(policy))
    assert out.outputs[0].finish_reason == "length"
    assert len(out.outputs[0].token_ids) == 40
    assert out.metrics.peak_blocks <= num_blocks
    roomy = make_llm(block_size=8, max_num_batched_tokens=32)
    assert tokens(roomy.generate(prompt, GREEDY, small(policy))) == tokens([out])


@pytest.mark.parametrize("policy", EVICTING)
def test_a_preempted_compressed_request_gives_the_same_tokens(policy, make_llm):
    prompts = tiny.prompts((20, 19, 18, 17), seed=7)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (160, 100, 100, 100)]
    configs = [None, *[small(policy, interval=16)] * 3]  # the first one grows and drives the others out
    calm = make_llm(block_size=8, max_num_batched_tokens=32).generate(prompts, params, configs)
    num_blocks = 40 if policy == "evict-only" else 26
    tight = make_llm(block_size=8, num_blocks=num_blocks, max_num_batched_tokens=32)
    crowded = tight.generate(prompts, params, configs)
    assert sum(out.metrics.preemptions for out in crowded) > 0
    passes = sum(out.metrics.compactions for out in crowded)
    assert tight.engine.totals.compactions > passes, "nobody was preempted after it was compressed"
    assert tokens(crowded) == tokens(calm)
    assert [out.metrics.tokens_evicted for out in crowded] == [out.metrics.tokens_evicted for out in calm]
    tight.engine.memory.check()
    assert tight.engine.memory.stats().in_use == 0


def test_admission_leaves_room_for_growth_that_is_known(make_llm):
    """Compressed sequences peak at budget + interval: nobody is admitted into what they will still take."""
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
    prompts = tiny.prompts((60, 45, 70, 12, 33), seed=8)
    llm = make_llm(block_size=8, max_num_batched_tokens=24, max_num_seqs=3)
    alone = [llm.generate(prompt, GREEDY, small(policy))[0] for prompt in prompts]
    llm.engine.memory.reset_prefix_cache()
    order = [3, 0, 4, 2, 1]
    together = llm.generate([prompts[i] for i in order], GREEDY, small(policy))
    assert tokens(together) == [alone[i].outputs[0].token_ids for i in order]


@pytest.mark.parametrize("policy", MOVING)
def test_siblings_of_a_compressed_request_do_not_notice(policy, make_llm):
    """A sibling shares its prefix blocks; whether the other one compresses changes none of its bits.

    A policy that has to see its prompt computed makes steps of other sizes than no policy, which shows in
    the last bits of all rows of a step: it is compared with itself moving nothing.
    """
    shared = tiny.prompts((64,), seed=9)[0]
    prompts = [shared + tail for tail in tiny.prompts((6, 6), seed=10)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    results = []
    fields = {"budget": 40, "interval": 16}
    still = None if takes_every_hit(policy) else small(f"evict-only({policy})", **fields)
    for neighbour in (still, small(policy, **fields)):
        llm = make_llm(block_size=8, max_num_batched_tokens=128)
        llm.generate(shared, SamplingParams(temperature=0.0, max_tokens=1))
        outputs = llm.generate(prompts, params, [None, neighbour])
        assert outputs[0].metrics.num_cached_tokens == 64
        assert outputs[1].metrics.num_cached_tokens == 64 or not takes_every_hit(policy)
        results.append(outputs)
        llm.engine.memory.check()
    assert results[1][1].metrics.compactions > 0
    assert tokens(results[0][:1]) == tokens(results[1][:1])
    assert logprobs(results[0][:1]) == logprobs(results[1][:1])


@pytest.mark.parametrize("policy", MOVING)
def test_compressing_never_writes_a_block_that_another_may_read(policy, make_llm, monkeypatch):
    """The bytes of shared and of indexed blocks are the same before and after every compaction."""
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    memory, cache = llm.engine.memory, llm.engine.cache
    compact = llm.engine.compression.methods[EvictionMethod.COMPACT]
    choose, apply = compact.choose, compact.apply
    due, watched = [], []

    def noted_choose(jobs):
        due[:] = jobs
        return choose(jobs)

    def checked_apply(job, choice):
        due.remove(job)
        others = {block for later in due for block in later.plan.source_ids}
        others |= {b for b in range(memory.pool.num_blocks) if memory.pool.refs[b] > 1}
        held = sorted(others)
        before = cache.k[:, held].clone(), cache.v[:, held].clone()
        done = apply(job, choice)
        assert torch.equal(cache.k[:, held], before[0])
        assert torch.equal(cache.v[:, held], before[1])
        watched.append(len(held))
        return done

    monkeypatch.setattr(compact, "choose", noted_choose)
    monkeypatch.setattr(compact, "apply", checked_apply)
    shared = tiny.prompts((64,), seed=9)[0]
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=40, ignore_eos=True)
    prompts = [shared + tail for tail in tiny.prompts((3, 9), seed=10)]
    llm.generate(prompts, params, small(policy))
    assert sum(watched) > 0


def test_prefix_hits_after_compression_are_exact(make_llm):
    """What a compressed request left in the index is what full attention computes."""
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
    """Three outputs of one prompt, all of them compressing: the same draws as three requests alone."""
    prompt = tiny.prompts((50,), seed=12)[0]
    config = small("query_mixture")
    params = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=40, ignore_eos=True)
    roomy = make_llm(block_size=8, max_num_batched_tokens=64).generate(prompt, params, config)[0]
    tight_llm = make_llm(block_size=8, num_blocks=11, max_num_batched_tokens=64)
    tight = tight_llm.generate(prompt, params, config)[0]
    assert tight.metrics.preemptions > 0
    assert [o.token_ids for o in tight.outputs] == [o.token_ids for o in roomy.outputs]
    assert len({tuple(o.token_ids) for o in roomy.outputs}) == 3
    assert tight_llm.engine.memory.stats().in_use == 0


def test_order_of_kept_slots_does_not_matter(make_llm):
    llm = make_llm(block_size=8)
    request = llm._add(tiny.prompts((40,), seed=13)[0], GREEDY, None)
    llm.engine.step()
    seq = request.sequences[0]
    before = torch.tensor(_next_logits(llm, seq))
    block_ids = torch.tensor(llm.engine.memory.table(seq.seq_id).block_ids)
    order = torch.randperm(seq.num_computed, generator=torch.Generator().manual_seed(0))
    ops.compact(llm.engine.cache, order[None, None], block_ids, block_ids)
    torch.testing.assert_close(torch.tensor(_next_logits(llm, seq)), before, atol=1e-5, rtol=0)


def _next_logits(llm, seq):
    """The logits of the sequence's next token, without advancing it."""
    plan = llm.engine.scheduler.schedule()
    llm.engine.runner.prepare(plan)
    logits, _ = llm.engine.runner.forward([Scheduled(seq, plan.rows[0])])
    assert plan.rows[0].seq_id == seq.seq_id
    return logits[0].tolist()


@pytest.mark.parametrize("policy", EVICTING)
def test_scoring_ones_own_output_predicts_it(policy, make_llm):
    """score() takes the path that generating took: compressed at the same points, seeing the same."""
    prompts = tiny.prompts((60, 25), seed=14)
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    outputs = llm.generate(prompts, GREEDY, small(policy))
    scored = llm.score(prompts, tokens(outputs), small(policy))
    assert [s.predicted for s in scored] == tokens(outputs)
    torch.testing.assert_close(
        torch.tensor([s.logprobs for s in scored]), torch.tensor(logprobs(outputs)), atol=1e-4, rtol=0
    )
