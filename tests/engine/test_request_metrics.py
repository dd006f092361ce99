"""Metrics of requests and steps, and the retention and priority that reach the memory."""

from __future__ import annotations

import math

import pytest
import tiny
from settings import small

from kvreclaim import SamplingParams
from kvreclaim.engine.step import request_factory
from kvreclaim.memory.blocks import PINNED
from kvreclaim.memory.pins import Retention

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_time_in_the_queue_ends_with_the_first_step_that_computes(make_llm, monkeypatch):
    llm = make_llm(max_num_seqs=1)
    engine = llm.engine
    first, second = (engine.add_request(f"r{i}", p, GREEDY) for i, p in enumerate(tiny.prompts((20, 20))))
    assert first.metrics.queue_s is None
    engine.step()
    assert second.metrics.queue_s is None
    known = first.metrics.queue_s
    while engine.has_unfinished:
        engine.step()
        assert first.metrics.queue_s == known, "preemption or not, it waited once"
    for request in (first, second):
        m = request.metrics
        assert 0 < m.queue_s <= m.ttft_s <= m.e2e_s
    assert second.arrival_s + second.metrics.queue_s > first.arrival_s + first.metrics.ttft_s


@pytest.mark.parametrize(("length", "indexed"), [(7, 0), (8, 8), (21, 16), (40, 40)])
def test_indexed_tokens_are_the_full_blocks_of_the_prompt(length, indexed, make_llm):
    llm = make_llm(block_size=8, max_num_batched_tokens=16)
    prompt = tiny.prompts((length,))[0]
    for cached in (0, max(0, length - 1) // 8 * 8):
        m = llm.generate(prompt, GREEDY)[0].metrics
        assert (m.num_cached_tokens, m.num_indexed_tokens) == (cached, indexed)
    off = make_llm(block_size=8, enable_prefix_caching=False).generate(prompt, GREEDY)[0].metrics
    assert off.num_indexed_tokens == 0


def test_indexed_tokens_of_a_prompt_that_was_compressed_on_its_way(make_llm):
    """Tokens computed before the first pass entered the index; none after it did."""
    llm = make_llm(block_size=8, max_num_batched_tokens=16)
    m = llm.generate(tiny.prompts((90,))[0], GREEDY, small("knorm"))[0].metrics
    assert m.num_indexed_tokens == 40


def test_indexed_tokens_count_the_prompt_also_of_scored_requests(make_llm):
    llm = make_llm(block_size=8)
    prompt, continuation = tiny.prompts((20, 30))
    assert llm.score([prompt], [continuation])[0].metrics.num_indexed_tokens <= 20


def recorded_pins(llm, monkeypatch):
    pinned, pin = [], llm.engine.memory.pin

    def noted(seq_id, retention, owner):
        pinned.append((llm.engine.memory.table(seq_id).logical_len, tuple(retention), owner))
        pin(seq_id, retention, owner)

    monkeypatch.setattr(llm.engine.memory, "pin", noted)
    return pinned


def ask_thrice(engine, kept):
    long = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    for i in range(3):
        prompt = tiny.prompts((30,), seed=i)[0]
        engine.add_request(f"r{i}", prompt, long, retention=kept, tenant="one")
    engine.add_request("none", tiny.prompts((20,), seed=9)[0], GREEDY, tenant="one")


def test_the_memory_pins_retention_once_when_the_prompt_is_there(make_llm, monkeypatch):
    llm = make_llm(block_size=8, num_blocks=60, max_num_batched_tokens=16)
    engine, pinned = llm.engine, recorded_pins(llm, monkeypatch)
    kept = [Retention(16, 300.0), Retention(8, 3600.0)]
    ask_thrice(engine, kept)
    while engine.has_unfinished:
        engine.step()
    assert engine.totals.num_preemptions == 0
    assert pinned == [(30, tuple(kept), "one")] * 3
    assert engine.memory.stats().pinned == 6


@pytest.mark.parametrize("host", [{}, {"kv_offloading_size": 8e6 / 2**30, "preemption_mode": "swap"}])
def test_prompts_that_are_there_again_are_pinned_again(host, make_llm):
    """Pinned blocks are reused where nothing else is left, and so lost with the request that is preempted."""
    llm = make_llm(block_size=8, num_blocks=11, max_num_batched_tokens=16, max_pinned_fraction=1.0, **host)
    engine, lost = llm.engine, 0
    pool, before = engine.memory.pool, 0
    ask_thrice(engine, [Retention(16, 300.0)])
    while engine.has_unfinished:
        engine.step()
        lost, before = lost + (len(pool.pins) < before), len(pool.pins)
        for seq in engine.scheduler.running:
            if seq.request_id != "none" and seq.num_computed >= seq.num_prompt:
                blocks = engine.memory.table(seq.seq_id).block_ids[:2]
                assert all(pool.marks[block] & PINNED for block in blocks if block in pool.index)
                assert any(block in pool.index for block in blocks)
    assert lost > 0, "some pins have to end"
    assert engine.totals.num_preemptions > 0
    assert (engine.totals.swaps > 0) == bool(host)
    assert engine.memory.stats().pinned > 0


def test_a_share_of_nothing_pins_nothing(make_llm):
    llm = make_llm(block_size=8, max_pinned_fraction=0.0)
    llm.engine.add_request("r", tiny.prompts((30,))[0], GREEDY, retention=[Retention(24, 300.0)])
    while llm.engine.has_unfinished:
        llm.engine.step()
    stats = llm.engine.memory.stats()
    assert (stats.pinned, stats.pins_refused) == (0, 3)


def test_the_memory_admits_with_priority(make_llm, monkeypatch):
    llm = make_llm(scheduling_policy="priority", eviction_policy="priority")
    admit, priorities = llm.engine.memory.admit, []
    monkeypatch.setattr(
        llm.engine.memory,
        "admit",
        lambda *args, priority, **rest: priorities.append(priority) or admit(*args, **rest),
    )
    for priority in (3, -2):
        llm.engine.add_request(f"r{priority}", [1, 2, 3], GREEDY, priority=priority)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert priorities == [-2, 3]


@pytest.mark.parametrize("order", ["lru", "slru", "priority"])
def test_outputs_do_not_depend_on_the_eviction_order(order, make_llm):
    prompts = [p for seed in range(3) for p in tiny.prompts((40, 25, 33), seed=seed)] * 2
    expected = [out.outputs[0].token_ids for out in make_llm().generate(prompts, GREEDY)]
    llm = make_llm(eviction_policy=order, block_size=8, num_blocks=16)
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)] == expected
    assert llm.engine.memory.stats().prefix_evictions > 0
    llm.engine.memory.check()


def test_a_steps_figures_add_up(make_llm):
    llm = make_llm(max_num_batched_tokens=16)
    steps = []
    sampled = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(
        tiny.prompts((50, 9, 20)),
        [GREEDY, sampled, GREEDY],
        [small("knorm"), None, None],
        on_step=steps.append,
    )
    assert all(s.num_tokens == s.num_prefill_tokens + s.num_decode_tokens <= 16 for s in steps)
    assert sum(s.num_prefill_tokens for s in steps) == sum(len(out.prompt_token_ids) for out in outputs)
    num_outputs = sum(len(out.outputs) for out in outputs)
    assert sum(s.num_decode_tokens for s in steps) == num_outputs * 11, "the last token is never computed"
    assert sum(s.num_prompts_done for s in steps) == 3
    assert llm.engine.totals.prompts_done == 3
    assert steps[-1].num_running == steps[-1].num_waiting == steps[-1].blocks_in_use == 0


def test_a_request_that_fits_nowhere_although_let_in_fails_alone(make_llm, monkeypatch):
    """Admission promised too much to one request: the engine reports it and goes on."""
    llm = make_llm(num_blocks=4)
    monkeypatch.setattr(request_factory, "check_length", lambda *_, **__: None)
    engine = llm.engine
    monkeypatch.setattr(request_factory, "output_limit", lambda *_, **__: math.inf)
    huge = engine.add_request("huge", tiny.prompts((100,))[0], GREEDY)
    engine.add_request("fine", tiny.prompts((10,))[0], GREEDY)
    fine = engine.requests["fine"]
    fine.max_len = fine.sequences[0].max_len = 22
    while engine.has_unfinished:
        engine.step()
    assert "fits into no empty pool" in huge.error
    assert fine.output().outputs[0].finish_reason == "length"
