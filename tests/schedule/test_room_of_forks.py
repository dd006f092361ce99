"""A fork of a compressed prefix that is let in finds the blocks that admission has counted, for every way of
compressing, on the device and back from the host."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
from hypothesis import assume, given

from kvreclaim.memory import MemoryManager
from kvreclaim.memory.offload import OffloadSlots
from kvreclaim.offload.plan.tiered_offload import TieredOffload
from kvreclaim.schedule import EvictionMethod, Footprint, ScheduledSequence, Scheduler, StepDone
from kvreclaim.schedule.admission import slots_of_fork
from kvreclaim.schedule.snapshot_key import SnapshotKey

SIZE = 4
KEY = SnapshotKey(None, "recipe", b"")


def run(scheduler, seq, num_tokens, draw):
    """Compute a sequence alone up to a length, with its passes."""
    while seq.num_computed < num_tokens:
        plan = scheduler.schedule()
        assert plan.rows, "nobody can go on"
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
