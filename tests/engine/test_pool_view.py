"""The pool as it is drawn, against a loop over every block and every table."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import tiny
from settings import small

from kvreclaim import SamplingParams
from kvreclaim.engine.serving.pool_view import pool_view
from kvreclaim.memory import blocks
from kvreclaim.memory.pins import Retention
from kvreclaim.page.view import CACHED, FREE, IN_USE, PINNED, SHARED


def slow_view(engine):
    """(state, name of the owner) of each block."""
    pool, found = engine.memory.pool, []
    for block in range(pool.num_blocks):
        holders = []
        for seq in engine.scheduler.running:
            held = engine.memory.table(seq.seq_id).block_ids.count(block)
            holders += [seq.request.request_id] * held
        if not holders:
            mark = pool.marks[block]
            is_kept = any(block in engine.memory.blocks(seq.seq_id) for seq in engine.scheduler.snapshots)
            is_cached = mark & blocks.INDEXED or is_kept
            state = PINNED if mark & blocks.PINNED else CACHED if is_cached else FREE
            found.append((state, None))
        else:
            first = list(dict.fromkeys(s.request.request_id for s in engine.scheduler.running))
            owner = min(holders, key=first.index)
            found.append((IN_USE if len(holders) == 1 else SHARED, owner))
    return found


def check(engine):
    view = pool_view(engine)
    assert view.state.dtype == np.uint8
    assert view.owner.dtype == np.int32
    names = [request.request_id for request in view.requests]
    owners = [None if index < 0 else names[index] for index in view.owner.tolist()]
    assert list(zip(view.state.tolist(), owners, strict=True)) == slow_view(engine)
    for shown in view.requests:
        seqs = [s for s in engine.scheduler.running if s.request.request_id == shown.request_id]
        tables = [engine.memory.table(seq.seq_id) for seq in seqs]
        assert shown.num_sequences == len(seqs)
        assert shown.logical_len == sum(seq.num_computed for seq in seqs)
        assert shown.physical_len == sum(table.physical_len for table in tables)
        assert shown.num_blocks == sum(len([b for b in t.block_ids if b is not None]) for t in tables)
        assert shown.num_evicted == sum(seq.account.num_evicted for seq in seqs)
        assert shown.blocks_freed == sum(seq.account.blocks_freed for seq in seqs)
    return view


def test_what_only_snapshots_hold_is_cached(make_llm):
    """They are cached also while a turn goes on from one; `stats` and a step's figures agree."""
    llm = make_llm(block_size=8, num_blocks=60, max_num_batched_tokens=48, conversation_snapshots=True)
    (prompt,) = tiny.prompts((100,), seed=4)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for turn in range(2):
        steps = []

        def look(step, steps=steps):
            view, stats = check(llm.engine), llm.engine.memory.stats()
            shown = np.bincount(view.state, minlength=5).tolist()
            assert stats.in_use == step.blocks_in_use == shown[IN_USE] + shown[SHARED]
            assert stats.cached == shown[CACHED]
            steps.append(step)

        (output,) = llm.generate([prompt], params, small("knorm"), on_step=look)
        assert (output.metrics.num_snapshot_tokens > 0) == (turn > 0)
        assert len(llm.engine.scheduler.snapshots) == turn + 1
        assert max(step.blocks_in_use for step in steps) > 0 == steps[-1].blocks_in_use
        prompt = prompt + output.outputs[0].token_ids + prompt[:20]


def test_every_block_is_what_a_loop_says(make_llm):
    llm = make_llm(block_size=8, num_blocks=60, max_num_batched_tokens=48)
    engine, rng, seen = llm.engine, random.Random(3), set()
    shared = tiny.prompts((60,))[0]
    configs = [None, small("knorm"), small("paged_eviction"), small("quest", budget=40)]
    for i in range(25):
        prompt = shared[: rng.randrange(1, 60)] + tiny.prompts((rng.randrange(1, 30),), seed=i)[0]
        params = SamplingParams(
            n=rng.choice([1, 1, 3]), temperature=1.0, seed=i, max_tokens=rng.randrange(1, 40), ignore_eos=True
        )
        config = rng.choice(configs)
        retention = (Retention(32, 300.0),) if rng.random() < 0.3 else ()
        compressor = llm.compressor(config) if config else None
        engine.add_request(f"r{i}", prompt, params, compressor, retention=retention)
        for _ in range(rng.randrange(8)):
            engine.step()
            seen |= set(check(engine).state.tolist())
        if engine.requests and rng.random() < 0.2:
            engine.abort(rng.choice(list(engine.requests)))
    while engine.has_unfinished:
        engine.step()
        seen |= set(check(engine).state.tolist())
    assert seen == {FREE, CACHED, PINNED, IN_USE, SHARED}
    assert check(engine).requests == ()


def test_a_pin_whose_time_is_over_is_not_shown(make_llm, monkeypatch):
    llm = make_llm(block_size=8)
    engine = llm.engine
    request = engine.add_request(
        "r", tiny.prompts((40,))[0], SamplingParams(max_tokens=1), retention=[Retention(24, 300.0)]
    )
    while engine.has_unfinished:
        engine.step()
    assert request.metrics.num_indexed_tokens == 40
    assert (pool_view(engine).state == PINNED).sum() == 3
    later = time.monotonic() + 301
    monkeypatch.setattr(engine.memory.pool.pins, "_clock", lambda: later)
    assert (pool_view(engine).state == PINNED).sum() == 0
    assert (pool_view(engine).state == CACHED).sum() == 5


def test_the_copy_stays_when_the_engine_goes_on(make_llm):
    llm = make_llm(block_size=8)
    llm.engine.add_request("r", tiny.prompts((40,))[0], SamplingParams(max_tokens=30, ignore_eos=True))
    llm.engine.step()
    view = pool_view(llm.engine)
    state, owner = view.state.copy(), view.owner.copy()
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert np.array_equal(view.state, state)
    assert np.array_equal(view.owner, owner)
    with pytest.raises(AttributeError):
        view.state = state
