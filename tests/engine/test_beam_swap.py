"""Beam searches that give way and keep what their blocks hold: parked as one, what they share once, and back
in one step."""

from __future__ import annotations

import odd_policies
import pytest
import tiny
from settings import assert_idle, small
from test_beam_search import MOVING, WIDE, answers, force, same

from kvreclaim import SamplingParams
from kvreclaim.schedule.sequence import Status

SWAP = {"kv_offloading_size": 0.05, "preemption_mode": "swap"}
PROMPTS = tiny.prompts((70, 37), seed=8)


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    odd_policies.register(monkeypatch)


def check_empty(llm):
    assert_idle(llm)
    assert llm.engine.memory.offload.parking.num_parked == llm.engine.memory.offload.host.pool.num_in_use == 0


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8", "int8+int4", "int4", "turboquant4"])
@pytest.mark.parametrize("policy", [None, *MOVING[:2], "ada_kv(snapkv(window=3),alpha=0)", "quest"])
def test_they_find_what_they_would_have_found(make_llm, monkeypatch, form, policy):
    """Equal to the bit, also in formats whose blocks would differ if they were computed again."""
    config = None if policy is None else small(policy, budget=48, interval=16)
    want = [make_llm(kv_cache_dtype=form).beam_search(prompt, WIDE, config)[0] for prompt in PROMPTS]
    llm = make_llm(kv_cache_dtype=form, **SWAP)
    force(llm, monkeypatch, 7)
    found = llm.beam_search(PROMPTS, WIDE, config)
    assert llm.engine.totals.swaps > 4
    same(answers(found), answers(want))
    check_empty(llm)


@pytest.mark.parametrize("how", [SWAP, {}, {"enable_prefix_caching": False}], ids=["swap", "cached", "anew"])
@pytest.mark.parametrize("victims", ["last", "priority", "lru", "cost"])
def test_searches_in_a_pool_that_holds_hardly_one(make_llm, victims, how):
    """Four searches and two other requests, moved to the host or computed again."""
    prompts = tiny.prompts((70, 37, 21, 50), seed=8)
    want = answers([make_llm().beam_search(prompt, WIDE)[0] for prompt in prompts])
    llm = make_llm(num_blocks=18, preemption_victim=victims, max_num_seqs=10, **how)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    others = [engine.add_request(f"o{i}", p, params) for i, p in enumerate(tiny.prompts((40, 60), seed=3))]
    requests = [engine.add_request(f"r{i}", p, WIDE.sampling, options=[WIDE]) for i, p in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
        for request in requests:
            assert len({seq.status for seq in request.sequences}) == 1, "beams run or wait as one"
    assert engine.totals.num_preemptions > 4
    assert (engine.totals.swaps > 0) == (how is SWAP)
    assert not [request.error for request in (*requests, *others) if request.error]
    same(answers([request.output() for request in requests]), want)
    assert_idle(llm)


@pytest.mark.parametrize("every", [9, 11, 13])
def test_that_give_way_while_some_of_them_wait_for_the_others_tokens(make_llm, monkeypatch, every):
    """A step has tokens for fewer beams than run: what those that it computed have come to stays."""
    prompts = tiny.prompts((9, 4), seed=8)
    want = [make_llm().beam_search(prompt, WIDE)[0] for prompt in prompts]
    llm = make_llm(max_num_batched_tokens=5, max_num_seqs=9, **SWAP)
    force(llm, monkeypatch, every)
    found = llm.beam_search(prompts, WIDE)
    assert llm.engine.totals.swaps > 4
    same(answers(found), answers(want))
    check_empty(llm)


def test_searches_of_two_tenants(make_llm):
    prompts = tiny.prompts((70, 37, 21, 50), seed=8)
    want = answers([make_llm().beam_search(prompt, WIDE)[0] for prompt in prompts])
    llm = make_llm(num_blocks=14, max_num_seqs=10, max_num_batched_tokens=8, **SWAP)
    engine = llm.engine
    requests = [
        engine.add_request(f"r{i}", prompt, WIDE.sampling, options=[WIDE], tenant="ab"[i % 2])
        for i, prompt in enumerate(prompts)
    ]
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
    assert engine.totals.swaps > 0
    assert not [request.error for request in requests if request.error]
    same(answers([request.output() for request in requests]), want)
    check_empty(llm)


def give_way_once(llm, monkeypatch, request):
    """Preempt the search in the first step in which all its beams run; no request begins in it."""
    scheduler = llm.engine.scheduler
    decide, held = scheduler._decide, []

    def preempting(step):
        running = [seq for seq in scheduler.running if seq.request is request]
        if len(running) == 4 and not held and running[0].num_computed > len(request.prompt_token_ids) + 5:
            memory = llm.engine.memory
            blocks = {block for seq in running for block in memory.table(seq.seq_id).blocks()}
            held.append(len(blocks))
            scheduler.preemptor.preempt([running[2]], running[0], "decode", step)
            step.pressed = True
        decide(step)

    monkeypatch.setattr(scheduler, "_decide", preempting)
    return held


def test_what_beams_share_is_parked_once(make_llm, monkeypatch):
    """In a step in which no other request runs: what is parked is moved all the same."""
    how = {"enable_prefix_caching": False, "block_size": 4}
    want = answers([make_llm(**how).beam_search(PROMPTS[0], WIDE)[0]])
    llm = make_llm(**how, **SWAP)
    llm.engine.tiers.moves.slots.bytes.fill_(0xFF)  # nothing but NaN comes back of blocks that were not moved
    request = llm.engine.add_request("r", PROMPTS[0], WIDE.sampling, options=[WIDE])
    held = give_way_once(llm, monkeypatch, request)
    while not held:
        llm.engine.step()
    memory = llm.engine.memory
    assert memory.offload.parking.num_parked == 4
    assert memory.offload.host.pool.num_in_use == held[0] < 4 * 18
    assert memory.pool.num_in_use == 0
    llm.engine.step()
    assert memory.offload.parking.num_parked == 0
    assert {seq.status for seq in request.sequences} == {Status.RUNNING}
    assert memory.pool.num_in_use <= held[0] + 4
    while llm.engine.has_unfinished:
        llm.engine.step()
    same(answers([request.output()]), want)
    check_empty(llm)


def test_an_abort_while_they_are_parked_leaves_nothing(make_llm, monkeypatch):
    llm = make_llm(**SWAP)
    request = llm.engine.add_request("r", PROMPTS[0], WIDE.sampling, options=[WIDE])
    held = give_way_once(llm, monkeypatch, request)
    while not held:
        llm.engine.step()
    assert llm.engine.memory.offload.parking.num_parked == 4
    llm.engine.abort("r")
    check_empty(llm)


def test_a_host_too_small_for_all_of_them_keeps_none(make_llm, monkeypatch):
    """They are computed again, and find the same."""
    (want,) = make_llm().beam_search(PROMPTS[0], WIDE)
    block = make_llm().engine.cache.bytes_per_block
    llm = make_llm(
        enable_prefix_caching=False, kv_offloading_size=3.5 * block / 2**30, preemption_mode="swap"
    )
    force(llm, monkeypatch, 7)
    (found,) = llm.beam_search(PROMPTS[0], WIDE)
    assert llm.engine.totals.swaps == 0
    assert sum(llm.engine.totals.preemptions.values()) > 4
    same(answers([found]), answers([want]))
    check_empty(llm)
