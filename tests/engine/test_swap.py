"""Sequences that are moved to the host and back answer as if never preempted, to the bit."""

from __future__ import annotations

import pytest
import tiny
from settings import assert_idle

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.rates import Rates

POLICIES = (
    "query_mixture",
    "snapkv(window=3)",
    "h2o",
    "kvzap",
    "shares(kvzap)",
    "shares(streaming_llm, by=static)",
    "paged_eviction",
    "quest",
)
FORMATS = ("fp32", "bf16", "fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4")
GIB = 2**30


def config(policy):
    if policy is None:
        return None
    budget = 48 if policy in ("paged_eviction", "quest") else 24
    return CompressionConfig(policy, budget=budget, interval=16, sinks=2, recent=4)


def answers(llm, policy, *, every=0, at_once=True, n=1):
    """Tokens and log-probabilities of two requests. at_once: every so many steps both are preempted, and back
    in the same step; else the last one, which is back in the next."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logprobs=0, n=n)
    compressor = None if policy is None else llm.compressor(config(policy))
    prompts = tiny.prompts((70, 37), seed=8)
    requests = [engine.add_request(f"r{i}", each, params, compressor) for i, each in enumerate(prompts)]
    decide = scheduler._decide

    def preempting(step):
        if every and engine.totals.steps % every == every - 1:
            for victim in list(reversed(scheduler.running[0 if at_once else 1 :])):
                scheduler.preemptor.preempt([victim], victim, "itself", step)
            step.pressed = not at_once
        decide(step)

    scheduler._decide = preempting
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
    del scheduler._decide
    assert_idle(llm)
    assert all(request.error is None for request in requests)
    return [
        (seq.token_ids, [entry.logprob for drawn in seq.logprobs for entry in drawn.values()])
        for request in requests
        for seq in request.sequences
    ]


def swapped(make_llm, policy, expected, *, n=1, **options):
    for at_once in (True, False):
        llm = make_llm(kv_offloading_size=8e6 / GIB, preemption_mode="swap", swap_space=8e6 / GIB, **options)
        found = answers(llm, policy, every=5, at_once=at_once, n=n)
        if at_once:
            assert found == expected
        else:  # steps have other rows, and so may round otherwise
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        totals = llm.engine.totals
        assert totals.swaps == totals.num_preemptions > 3
        assert llm.engine.memory.offload.host.pool.num_in_use == 0


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_every_policy(policy, kernels, make_llm):
    options = {"kernels": kernels, "spread_compression": False}
    swapped(make_llm, policy, answers(make_llm(**options), policy), **options)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("policy", [None, "query_mixture", "shares(streaming_llm, by=static)"])
def test_every_format(form, policy, make_llm):
    options = {"kv_cache_dtype": form, "kernels": "native"}
    swapped(make_llm, policy, answers(make_llm(**options), policy), **options)


@pytest.mark.parametrize("family", ["gemma2", "deepseek-v3", "gpt-oss"])
def test_every_family(family, make_llm):
    options = {"family": family}
    swapped(make_llm, None, answers(make_llm(**options), None), **options)


def test_forks(make_llm):
    swapped(make_llm, "query_mixture", answers(make_llm(), "query_mixture", n=3), n=3)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(("policy", "num_blocks"), [(None, 15), ("query_mixture", 16)])
def test_outputs_of_a_request_give_way_together(mode, policy, num_blocks, make_llm):
    """One after the other they would free only what they do not share; what they do share is moved once."""
    where = {"kv_offloading_size": 8e6 / GIB, "preemption_mode": mode}
    found, plans = grouped(make_llm(num_blocks=num_blocks, max_num_batched_tokens=64, **where), policy)
    expected, calm = grouped(make_llm(num_blocks=200, max_num_batched_tokens=64), policy)
    assert found == expected
    assert not any(plan.preempted for plan in calm)
    lost = [(plan, [each for each in plan.preempted if each.reason != "itself"]) for plan in plans]
    lost = [(plan, gone) for plan, gone in lost if gone]
    assert any(len(gone) == 4 for _, gone in lost), "outputs that need blocks themselves go one by one"
    for plan, gone in lost:
        assert all(each.parked == (mode == "swap") for each in gone)
        assert len({block for block, _ in plan.swap_out}) == len(plan.swap_out)


@pytest.mark.parametrize(("policy", "num_blocks"), [(None, 15), ("query_mixture", 16), ("h2o", 16)])
def test_an_aborted_group_leaves_nothing(policy, num_blocks, make_llm):
    where = {"kv_offloading_size": 8e6 / GIB, "preemption_mode": "swap"}
    llm = make_llm(num_blocks=num_blocks, max_num_batched_tokens=64, **where)
    engine, memory, (first, second) = llm.engine, llm.engine.memory, ask_both(llm, policy)
    while engine.has_unfinished and memory.offload.parking.num_parked < 4:
        engine.step()
    assert (memory.offload.parking.num_parked, memory.offload.parking.num_parked_slots > 0) == (
        4,
        policy is not None,
    )
    engine.abort(second.request_id)
    memory.check()
    assert (memory.offload.parking.num_parked, memory.offload.parking.num_parked_slots) == (0, 0)
    assert not engine.tiers.parking._aside
    assert {seq.request_id for seq in engine.lifecycle.sequences.values()} == {first.request_id}
    while engine.has_unfinished:
        engine.step()
    assert_idle(llm)
    assert memory.offload.host.pool.num_in_use == 0


def ask_both(llm, policy):
    """One request that grows, and another of four outputs that comes later."""
    compressor = None if policy is None else llm.compressor(config(policy))
    long, wide = tiny.prompts((33, 50), seed=8)
    first = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    second = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, n=4)
    engine = llm.engine
    return [engine.add_request("a", long, first), engine.add_request("b", wide, second, compressor)]


def grouped(llm, policy):
    """OutputProcessor to both, and all plans."""
    engine, plans = llm.engine, []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    requests = ask_both(llm, policy)
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
    assert_idle(llm)
    assert all(request.error is None for request in requests)
    return [seq.token_ids for request in requests for seq in request.sequences], plans


def test_without_prefix_caching(make_llm):
    options = {"enable_prefix_caching": False}
    swapped(make_llm, None, answers(make_llm(**options), None), **options)


def test_no_room_on_the_host(make_llm):
    """A sequence without slots is computed again; its tokens are the same where rounding allows it."""
    llm = make_llm(kv_offloading_size=40_000 / GIB, preemption_mode="swap")
    few, roomy = answers(llm, "query_mixture", every=5), answers(make_llm(), "query_mixture")
    assert [tokens for tokens, _ in few] == [tokens for tokens, _ in roomy]
    assert llm.engine.totals.swaps < llm.engine.totals.num_preemptions


def test_an_aborted_victim_leaves_nothing(make_llm):
    llm = make_llm(kv_offloading_size=8e6 / GIB, preemption_mode="swap", num_blocks=8, max_num_seqs=4)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for i, prompt in enumerate(tiny.prompts((40, 40, 40), seed=2)):
        engine.add_request(f"r{i}", prompt, params)
    while not engine.totals.swaps:
        engine.step()
    (parked,) = [
        seq for seq in engine.scheduler.waiting if engine.memory.offload.parking.is_parked(seq.seq_id)
    ]
    engine.abort(parked.request.request_id)
    engine.memory.check()
    while engine.has_unfinished:
        engine.step()
    assert_idle(llm)
    assert engine.memory.offload.host.pool.num_in_use == 0
    assert engine.memory.offload.host.pool.num_cached > 0


def test_swap_needs_a_host(make_llm):
    with pytest.raises(InvalidArgumentError, match="preemption_mode is 'swap', but kv_offloading_size is 0"):
        make_llm(preemption_mode="swap")
    with pytest.raises(InvalidArgumentError, match=r"swap_space is 2\.0 GiB, more than kv_offloading_size"):
        make_llm(kv_offloading_size=0.01, swap_space=2.0)
    with pytest.raises(InvalidArgumentError, match="less than one block"):
        make_llm(kv_offloading_size=10 / GIB)


def test_what_is_cheaper_by_the_formulas():
    """An 8 B model in bf16, blocks of 16 tokens, a bus of 25 GB/s (Llama 3.1 8B on an H100)."""
    rates = Rates(token_s=301e-3 / 8192, pass_s=0.0, out_s=1 / 25e9, in_s=1 / 25e9, call_s=0.0)
    whole = 131_072 * 8192
    assert rates.swap_s(whole, whole) == pytest.approx(85.9e-3, rel=1e-3)
    assert rates.recompute_s(8192, 0, 0) / rates.swap_s(whole, whole) == pytest.approx(3.5, rel=0.01)
    assert rates.recompute_s(8192, 6144, 0) == pytest.approx(75e-3, rel=0.01)
    compressed = 131_072 * 2176
    assert rates.swap_s(compressed, compressed) == pytest.approx(22.8e-3, rel=0.01)
    assert rates.recompute_s(32_768, 0, 240) / rates.swap_s(compressed, compressed) > 50
    assert rates.swap_s(0, 0) == 0


@pytest.mark.parametrize("fails", ["out", "load"])
def test_a_copy_that_fails_changes_no_answer(fails, make_llm):
    """A request to be computed ends; one parked, or coming back, is computed anew and answers as alone."""
    prompts = tiny.prompts((40, 41, 42), seed=2)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in make_llm().generate(prompts, params)]
    options = {"kv_offloading_size": 8e6 / GIB, "preemption_mode": "swap", "kv_offload_decode": False}
    llm = make_llm(**options, num_blocks=12, max_num_seqs=4)
    engine, moves = llm.engine, llm.engine.tiers.moves
    moves.slots.bytes.fill_(0x55)  # so that a slot that was never filled is seen
    work, calls, parked = getattr(moves, fails), [], []

    def broken(pairs):
        calls.append(pairs)
        if len(calls) == 1:
            parked.append(engine.memory.offload.parking.num_parked)
            raise MemoryError("no room for a copy")
        work(pairs)

    setattr(moves, fails, broken)
    requests = [engine.add_request(f"r{i}", each, params) for i, each in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
        if len(calls) == 1 and fails == "out":
            assert parked == [1]
            assert not engine.memory.offload.parking.num_parked, "what was not moved is kept as parked"
    assert calls
    assert any(request.error for request in requests)
    for request, prompt, tokens in zip(requests, prompts, expected, strict=True):
        if request.error is None:
            assert request.sequences[0].token_ids[len(prompt) :] == tokens
    again = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert_idle(llm)
    assert engine.memory.offload.host.pool.num_in_use == 0
