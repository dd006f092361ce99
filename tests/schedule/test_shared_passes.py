"""Passes over blocks that others read, too, in a pool that is nearly full: no pass is late."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvreclaim.memory import MemoryManager
from kvreclaim.schedule import EvictionMethod, Footprint, ScheduledSequence, Scheduler, StepDone
from kvreclaim.schedule.disk_prefixes import DiskPrefixIndex
from kvreclaim.schedule.snapshot_key import SnapshotKey

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
        assert plan.rows, "a sequence can always go on"
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
    """Its first blocks were hit by a neighbour, which goes on reading them; a pass may not write these."""
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


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def key(number=0, salt=None, recipe="a", **more):
    return SnapshotKey(salt, recipe, bytes([number]) * 80, **more)


def asker(seq_id, found, max_prefix_hit=None):
    return ScheduledSequence(
        seq_id, str(seq_id), [0] * 12, 12, 20, snapshot_key=found, max_prefix_hit=max_prefix_hit
    )


def below(wait_s=5.0, is_worth=True):
    clock = Clock()
    return DiskPrefixIndex(lambda _: wait_s, lambda *_: is_worth, clock), clock


def test_a_name_is_of_every_field():
    names = {key().name, key(1).name, key(salt="").name, key(salt="a").name, key(recipe="b").name}
    assert len(names) == 5
    assert key().name == key().name
    assert SnapshotKey("ab", "c", b"").name != SnapshotKey("a", "bc", b"").name
    assert key(3).token_ids == [0x0303030303030303] * 10


def test_two_that_ask_for_the_same_cause_one_read():
    prefixes, _ = below()
    prefixes.know([(key().name, 100)])
    assert prefixes.ask(asker(1, key()))
    assert prefixes.ask(asker(2, key()))
    assert prefixes.take_wanted() == [key()]
    assert prefixes.take_wanted() == []
    assert prefixes.must_wait(1)
    assert prefixes.must_wait(2)
    assert prefixes.num_deferred == 2
    assert prefixes.arrived(key())
    assert not prefixes.must_wait(1)
    assert prefixes.has_missed(2)
    assert not prefixes.has_missed(2), "it is reported once"
    prefixes.leave(1)
    prefixes.leave(2)
    assert prefixes.num_deferred == prefixes.num_coming == 0


def test_no_sequence_waits_longer_than_its_limit():
    prefixes, clock = below(wait_s=2.0)
    prefixes.know([(key().name, 100)])
    prefixes.ask(asker(1, key()))
    clock.now = 1.9
    assert prefixes.must_wait(1)
    clock.now = 2.0
    assert not prefixes.must_wait(1)
    prefixes.ask(asker(1, key()))
    assert not prefixes.must_wait(1), "a sequence that asks again has no more time"
    assert prefixes.arrived(key()), "it is still read, for others"


def test_what_is_not_wanted():
    prefixes, _ = below()
    assert not prefixes.ask(asker(1, key()))
    prefixes.know([(key().name, 100), (key(1, is_lasting=False).name, 100)])
    assert not prefixes.ask(asker(2, None))
    assert not prefixes.ask(asker(3, key(), max_prefix_hit=9))
    assert not prefixes.ask(asker(4, key(1, is_lasting=False)))
    assert prefixes.ask(asker(5, key(), max_prefix_hit=10))
    unworthy, _ = below(is_worth=False)
    unworthy.know([(key().name, 100)])
    assert not unworthy.ask(asker(1, key()))


def test_what_is_cleared_is_of_no_use():
    prefixes, _ = below()
    prefixes.know([(key().name, 100)])
    prefixes.ask(asker(1, key()))
    assert (prefixes.num_files, prefixes.num_bytes) == (1, 100)
    prefixes.clear()
    assert not prefixes.take_wanted()
    assert not prefixes.must_wait(1)
    assert not prefixes.arrived(key())
    assert key() not in prefixes
