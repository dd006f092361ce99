"""The arithmetic of budgets against sequences that are walked through it token by token."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from kvreclaim.memory import MemoryManager
from kvreclaim.memory.offload import OffloadSlots
from kvreclaim.offload.plan.tiered_offload import TieredOffload
from kvreclaim.schedule import (
    EvictionCounters,
    EvictionMethod,
    Footprint,
    ScheduledSequence,
    Scheduler,
    StepDone,
)
from kvreclaim.schedule.admission import slots_of_fork
from kvreclaim.schedule.budget.footprint import budget_in_blocks
from kvreclaim.schedule.snapshot_key import SnapshotKey


def random_footprint(rng: random.Random) -> Footprint:
    size = rng.choice([1, 4, 8])
    interval = rng.randrange(size, 40)
    return Footprint(
        eviction_method=rng.choice(list(EvictionMethod)),
        budget=rng.randrange(1, 8) * size + size,
        interval=interval,
        prompt_only=rng.random() < 0.2,
        window=rng.choice([1, 1, 5, None]),
        block_size=size,
        max_chunk=rng.randrange(1, 60),
        offset=rng.randrange(interval - size + 1) if rng.random() < 0.5 else 0,
    )


def walk(footprint: Footprint, num_prompt: int, length: int, rng: random.Random) -> tuple[list[int], int]:
    """Logical lengths at the passes of a sequence computed in random chunks, and the most slots it held."""
    account, computed, passes, most = EvictionCounters(), 0, [], 0
    while computed < length:
        known = max(num_prompt, computed + 1)
        chunk = min(known - computed, footprint.tokens_until_pass(computed, num_prompt, account))
        assert chunk >= 1
        computed += rng.randint(1, min(chunk, footprint.max_chunk))
        most = max(most, computed - (account.num_evicted if footprint.eviction_method.evicts else 0))
        if footprint.is_due(computed, num_prompt, account):
            live = computed - account.num_evicted
            keep = footprint.kept(live)
            assert keep < live
            assert footprint.budget - footprint.block_size < keep <= footprint.budget
            account.num_evicted, account.last_computed = computed - keep, computed
            passes.append(computed)
    return passes, most


@pytest.mark.parametrize("seed", range(400))
def test_a_walk_keeps_every_promise(seed):
    rng = random.Random(seed)
    footprint = random_footprint(rng)
    num_prompt = rng.randrange(1, 150)
    length = num_prompt + rng.randrange(1, 120)
    passes, most = walk(footprint, num_prompt, length, rng)
    first = footprint.first_pass(num_prompt)
    assert (passes[0] if passes else None) == (first if first is not None and first <= length else None)
    assert most <= footprint.slots_needed(num_prompt, length)
    assert footprint.most_tokens is None or most <= footprint.most_tokens
    limit = footprint.hit_limit(num_prompt, length)
    assert 0 <= limit <= length
    if first is not None and footprint.window is not None:
        assert limit <= max(0, first - footprint.window)


@pytest.mark.parametrize("seed", range(50))
def test_due_points_do_not_depend_on_how_chunks_fall(seed):
    """Behind the prompt; inside it only where a chunk ends can a pass be."""
    rng = random.Random(seed)
    footprint = random_footprint(rng)
    ways = [walk(footprint, 20, 300, random.Random(i))[0] for i in range(4)]
    assert all(passes == ways[0] for passes in ways)


def test_offsets_spread_the_passes_of_requests_that_arrive_together():
    for num_prompt, first in ((40, 96), (90, 90)):  # first compressed while it generates; at its prompt's end
        for offset in range(0 if first == 96 else 6, 25):
            footprint = Footprint(EvictionMethod.COMPACT, budget=64, interval=32, block_size=8, offset=offset)
            passes, _ = walk(footprint, num_prompt, 300, random.Random(0))
            early = first - offset if num_prompt == 40 else first
            second = early + 32 if num_prompt == 40 else early + 32 - offset
            assert passes == [early, *range(second, 301, 32)]


@pytest.mark.parametrize("seed", range(200))
def test_aligned_passes_give_back_whole_blocks_wherever_chunks_fall(seed):
    """Computation cuts no chunk at a point that is due."""
    rng = random.Random(seed)
    size, budget, chunk = rng.choice([1, 4, 8]), rng.randrange(1, 60), rng.randrange(1, 60)
    footprint = Footprint(
        EvictionMethod.COMPACT, budget, rng.randrange(1, 40), block_size=size, max_chunk=chunk, aligned=True
    )
    num_prompt, length, account, computed = rng.randrange(1, 300), 400, EvictionCounters(), 0
    while computed < length:
        computed += rng.randint(1, max(1, min(chunk, num_prompt - computed)))
        live = computed - account.num_evicted
        assert live <= footprint.slots_needed(num_prompt, computed) <= footprint.most_tokens
        due = footprint.is_due(computed, num_prompt, account)
        assert due == (live >= budget + max(footprint.interval, size))
        if due:
            keep = footprint.kept(live)
            assert budget <= keep < budget + size
            assert (live - keep) % size == 0 < live - keep
            account.num_evicted, account.last_computed = computed - keep, computed


@pytest.mark.parametrize("size", [1, 5, 16])
def test_the_budget_of_whole_blocks_is_the_nearest_that_is_legal(size):
    for protected in (0, 3, 15, 16, 33):
        for budget in range(protected + 1, protected + 70):
            legal = [n for n in range(size, budget + 100, size) if n > protected]
            best = min(legal, key=lambda n: (abs(n - budget), n))
            assert budget_in_blocks(budget, size, protected) == best


SIZE = 4
KEY = SnapshotKey(None, "recipe", b"")


def run(scheduler, seq, num_tokens, draw):
    """Compute a sequence alone up to a length, with its passes."""
    while seq.num_computed < num_tokens:
        plan = scheduler.schedule()
        assert plan.rows, "no sequence can go on"
        assert not plan.failed
        assert scheduler.update_from_output(plan, StepDone(tuple(row.seq_id for row in plan.rows))) == []
        for done in scheduler.compress([seq]):
            if done.eviction_method is EvictionMethod.BLOCKS:
                held, count = range(done.num_tokens // SIZE), (done.num_tokens - done.keep) // SIZE
                gone = sorted(draw(st.permutations(held))[:count])
                scheduler.compressed(done, gone, None)


@given(st.data())
def test_what_is_let_in_finds_its_blocks(data):
    draw = data.draw
    way = draw(
        st.sampled_from([EvictionMethod.COMPACT, EvictionMethod.CELLS, EvictionMethod.BLOCKS]),
        label="way",
    )
    budget, at = draw(st.integers(2, 6)) * SIZE, draw(st.integers(13, 40), label="compress_prompt_at")
    footprint = Footprint(
        way,
        budget,
        interval=draw(st.integers(1, 12)),
        block_size=SIZE,
        max_chunk=draw(st.integers(1, 12)),
        compress_prompt_at=at,
        prompt_only=draw(st.booleans()),
    )
    assume(at > budget)
    num_blocks = 48
    on_host = draw(st.booleans(), label="host")
    offload = partial(TieredOffload, num_host_slots=64) if on_host else OffloadSlots
    memory = MemoryManager(num_blocks, SIZE, offload=offload)
    scheduler: Scheduler[ScheduledSequence] = Scheduler(
        memory, max_num_seqs=4, max_num_batched_tokens=footprint.max_chunk, max_snapshot_blocks=num_blocks
    )
    tokens = list(range(at + draw(st.integers(1, 30), label="tail")))
    first = ScheduledSequence(0, "a", list(tokens), len(tokens), len(tokens) + 1, footprint=footprint)
    scheduler.add(first)
    run(scheduler, first, at, draw)
    hidden = replace(first, seq_id=9, token_ids=tokens[:at], keys=None, snapshot_key=KEY)
    assert scheduler.snapshots.keep(first, hidden)
    scheduler.remove(first)
    if on_host and draw(st.booleans(), label="parked"):
        assert scheduler.snapshots.evict_one()
        scheduler.schedule()
    num_left = draw(st.integers(0, num_blocks), label="free")
    assume(num_left <= memory.num_free)
    others = memory.pool.allocate(memory.num_free - num_left)
    seq = ScheduledSequence(
        1, "b", list(tokens), len(tokens), len(tokens) + 40, first_id=1, footprint=footprint
    )
    fits = -(-slots_of_fork(seq, hidden, memory) // SIZE) <= num_left
    seq.snapshot_key = KEY
    scheduler.add(seq)
    if fits:
        run(scheduler, seq, len(tokens), draw)
        assert scheduler.snapshots.num_hits == 1
        scheduler.remove(seq)
    memory.pool.release(others)
