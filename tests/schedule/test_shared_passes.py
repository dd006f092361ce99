"""Passes over blocks that others read, too, in a pool that is nearly full: no pass is late."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvreclaim.memory import MemoryManager
from kvreclaim.schedule import EvictionMethod, Footprint, ScheduledSequence, Scheduler, StepDone

SIZE, CHUNK = 8, 32
PROMPT = list(range(400))


@dataclass
class Pair:
    """One whose cache stays whole, and one that is compressed and begins with the same tokens.

    passes: lengths at which the second one was compressed, since it began anew
    """

    num_blocks: int
    steps: int = 0
    preempted: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.memory = MemoryManager(self.num_blocks, SIZE)
        self.scheduler: Scheduler[ScheduledSequence] = Scheduler(
            self.memory, max_num_seqs=4, max_num_batched_tokens=2 * CHUNK
        )
        footprint = Footprint(EvictionMethod.COMPACT, budget=64, interval=8, block_size=SIZE, max_chunk=CHUNK)
        self.whole = ScheduledSequence(0, "whole", PROMPT[:104], 104, 130)
        self.small = ScheduledSequence(1, "small", list(PROMPT), 400, 402, first_id=1, footprint=footprint)
        self.live: list[ScheduledSequence] = []

    def add(self, seq):
        self.live.append(seq)
        self.scheduler.add(seq)

    def step(self):
        plan = self.scheduler.schedule()
        assert plan.rows, "somebody can always go on"
        assert not plan.failed
        self.preempted += [lost.seq_id for lost in plan.preempted]
        rows = {row.seq_id: row for row in plan.rows}
        drawn = {
            seq.seq_id: (7,)
            for seq in self.live
            if seq.seq_id in rows
            and rows[seq.seq_id].first + rows[seq.seq_id].num_tokens == len(seq.token_ids)
        }
        assert self.scheduler.update_from_output(plan, StepDone(tuple(rows), drawn)) == []
        for seq in [seq for seq in self.live if len(seq.token_ids) >= seq.max_len]:
            self.live.remove(seq)
            self.scheduler.remove(seq)
        done = self.scheduler.compress([seq for seq in self.live if seq.seq_id in rows])
        assert not any(seq.is_due for seq in self.scheduler.running), "a pass is late"
        self.passes = [at for at in self.passes if at < self.small.num_computed]
        self.passes += [one.logical_len for one in done]
        self.memory.check()
        self.steps += 1
        assert self.steps < 100, "one of them gets nowhere"


@pytest.mark.parametrize("num_blocks", [17, 18, 19, 20, 22, 25, 60])
def test_a_neighbour_that_hits_its_blocks_moves_no_pass(num_blocks):
    """Its first blocks were hit by a neighbour, who goes on reading them; a pass may not write these."""
    alone = Pair(60)
    alone.add(alone.small)
    while alone.live:
        alone.step()
    pair = Pair(num_blocks)
    pair.add(pair.small)
    while pair.live:
        pair.step()
        if pair.small.num_computed == 64 and pair.whole not in pair.live:
            pair.add(pair.whole)
    assert pair.passes == alone.passes
    assert pair.memory.stats().in_use == 0
    assert not pair.preempted or num_blocks < 60


@pytest.mark.parametrize("num_blocks", range(17, 32))
def test_a_prompt_that_will_need_blocks_of_its_own_begins_when_there_are_enough(num_blocks):
    """It hits blocks that a neighbour holds, and shares none of them after its first pass: let in by what is
    missing before that pass, it would be preempted and begin again every other step."""
    pair = Pair(num_blocks)
    pair.add(pair.whole)
    while pair.live:
        pair.step()
        if pair.whole.num_computed == 104:
            pair.add(pair.small)
    assert len(pair.preempted) <= 1, "the neighbour's own growth may cost it its place once"
    assert pair.memory.stats().in_use == 0
