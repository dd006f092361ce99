"""Snapshots without an engine: which requests find which, and which gives way to which."""

from __future__ import annotations

import random
from array import array

from kvreclaim.memory import MemoryManager
from kvreclaim.schedule import ScheduledSequence
from kvreclaim.schedule.snapshot_key import LINK, SnapshotKey
from kvreclaim.schedule.snapshots import Snapshots

SIZE, BUDGET = 4, 8


def key(tokens, salt=None, recipe="a", **more):
    return SnapshotKey(salt, recipe, array("q", tokens).tobytes(), **more)


class World:
    """Sequences of two blocks each leave snapshots of any tokens."""

    def __init__(self, max_blocks, num_blocks=200):
        self.memory = MemoryManager(num_blocks, SIZE)
        self.now = 100.0
        self.snapshots: Snapshots[ScheduledSequence] = Snapshots(self.memory, max_blocks, lambda: self.now)
        self.num_seqs = 0

    def waiting(self, tokens, lineage, **more):
        self.num_seqs += 1
        seq = ScheduledSequence(self.num_seqs, "r", list(tokens), len(tokens), 999, lineage=lineage, **more)
        seq.keys = self.memory.keys(seq.token_ids)
        return seq

    def leave(self, kept, **more):
        """A sequence leaves a snapshot of this key. Returns: it, or None."""
        parent = self.waiting(range(BUDGET), None, **more)
        self.memory.admit(parent.seq_id, self.memory.match_prefix(parent.keys, max_tokens=0))
        self.memory.grow(parent.seq_id, BUDGET)
        self.memory.commit(parent.seq_id, BUDGET, exact=False)
        parent.num_computed = kept.num_tokens
        snapshot = self.waiting(kept.token_ids, None, **more)
        snapshot.snapshot_key = kept
        has_room = self.snapshots.keep(parent, snapshot)
        self.memory.free(parent.seq_id)
        self.memory.check()
        return snapshot if has_room else None

    def begin(self, snapshot, tenant=None):
        """A sequence begins with it and ends."""
        seq = self.waiting(range(BUDGET), None, tenant=tenant)
        self.snapshots.begin(snapshot, seq)
        self.snapshots.take_parked()
        self.memory.free(seq.seq_id)


def test_the_longest_is_found_whatever_else_is_there():
    """Against a look at all of them: beginnings that part within a link and behind it, other salts and
    recipes, with and without a past, while some come and go."""
    rng, world = random.Random(5), World(60)
    parts = [[rng.randrange(9) for _ in range(rng.choice((1, 3, LINK - 1, LINK, 90)))] for _ in range(4)]

    def some():
        text = [token for _ in range(rng.randrange(5)) for token in rng.choice(parts)]
        return key(text, rng.choice((None, "s")), rng.choice(("a", "b")), has_past=rng.random() < 0.5)

    found = 0
    for _ in range(600):
        world.leave(some())
        if rng.random() < 0.1:
            world.snapshots.drop(rng.choice([seq.snapshot_key for seq in world.snapshots]))
        lineage, most = some(), rng.choice((None, None, 100))
        seq = world.waiting(lineage.token_ids, lineage, max_prefix_hit=most)
        lengths = [
            each.num_computed
            for each in world.snapshots
            if each.snapshot_key.begins(lineage) and (most is None or each.num_computed <= most)
        ]
        got = world.snapshots.find(seq)
        assert (None if got is None else got.num_computed) == max(lengths, default=None)
        assert got is None or got.snapshot_key.begins(lineage)
        found += got is not None
    assert 100 < found < 590
    world.snapshots.clear()
    assert not world.snapshots._by_link


def test_the_tenant_that_holds_most_gives_way():
    """One that leaves a snapshot at each turn of many conversations has what the others leave it."""
    world = World(20)  # ten of them
    kept = [world.leave(key([tenant, n]), tenant=tenant) for tenant in (1, 2) for n in range(2)]
    for n in range(30):
        assert world.leave(key([3, n]), tenant=3)
    assert [seq for seq in world.snapshots if seq.tenant != 3] == kept
    for n in range(30):
        assert world.leave(key([4, n]), tenant=4)
    held = {tenant: [s for s in world.snapshots if s.tenant == tenant] for tenant in (1, 2, 3, 4)}
    assert {tenant: len(seqs) for tenant, seqs in held.items()} == {1: 2, 2: 2, 3: 3, 4: 3}
    assert [seq.token_ids[1] for seq in held[3]] == [27, 28, 29], "the least recently used went"


def test_what_is_superseded_goes_first_whoever_holds_it():
    world = World(8)
    old, new = world.leave(key([1]), tenant=1), world.leave(key([1, 2]), tenant=1)
    others = [world.leave(key([n]), tenant=2) for n in (5, 6)]
    world.snapshots.give_way(old.snapshot_key)
    third = world.leave(key([7]), tenant=2)
    assert list(world.snapshots) == [new, *others, third]
    world.snapshots.give_way(new.snapshot_key)
    world.begin(new, tenant=1)
    fourth = world.leave(key([8]), tenant=2)
    assert list(world.snapshots) == [others[1], third, new, fourth], "it is in use again"


def test_one_from_elsewhere_is_whoever_begins_with_it():
    world = World(8)
    seqs = [world.leave(key([n]), tenant=None) for n in range(3)]
    for seq in seqs:
        world.begin(seq, tenant=1)
    mine = world.leave(key([9]), tenant=2)
    world.leave(key([10]), tenant=2)
    assert list(world.snapshots)[:3] == [*seqs[1:], mine]


def test_one_that_is_to_be_kept_goes_behind_others_for_its_time():
    """A hit begins the time anew; afterwards it is one like any other; no sequence lacks blocks for it."""
    world = World(8)  # four of them
    kept = world.leave(key([0]), keep_s=60.0)

    def others(first):
        for n in range(first, first + 5):
            assert world.leave(key([n]))
        return kept in list(world.snapshots)

    assert others(1)
    world.now += 59.9
    assert others(11)
    world.begin(kept)
    world.now += 59.9
    assert others(21)
    world.now += 0.1
    assert not others(31)
    for n in range(4):
        assert world.leave(key([40 + n]), keep_s=60.0)
    assert world.leave(key([50])), "all are to be kept: the least recently used goes"
    while world.snapshots.evict_one():
        world.memory.check()
    assert world.memory.num_idle == 0


def test_one_that_is_left_again_is_kept_for_its_new_time():
    """It goes behind the others, is as important, and stays for its new keep_s."""
    world = World(8)
    first = world.leave(key([0]), priority=3)
    others = [world.leave(key([1 + n]), priority=1) for n in range(3)]
    world.snapshots.give_way(first.snapshot_key)
    assert world.leave(key([0]), priority=1, keep_s=60.0) is None, "it is here"
    assert list(world.snapshots) == [*others, first]
    for n in range(5):
        assert world.leave(key([10 + n]), priority=1)
    assert first in list(world.snapshots)
    world.now += 60
    for n in range(4):
        assert world.leave(key([20 + n]), priority=1)
    assert first not in list(world.snapshots)


def test_a_tenant_keeps_its_equal_part_at_most():
    world = World(16)  # eight of them
    mine = [world.leave(key([1, n]), tenant=1, keep_s=60.0) for n in range(8)]
    for n in range(20):
        assert world.leave(key([2, n]), tenant=2)
    assert [seq for seq in world.snapshots if seq.tenant == 1] == mine[4:]
    for n in range(20):
        assert world.leave(key([2, 100 + n]), tenant=2, keep_s=60.0)
    assert [seq for seq in world.snapshots if seq.tenant == 1] == mine[4:]


def test_the_least_important_gives_way():
    """One is as important as the most important sequence that began with it."""
    world = World(8)
    batch = [world.leave(key([n]), priority=5) for n in range(2)]
    world.begin(batch[0])
    others = [world.leave(key([2 + n]), priority=3) for n in range(2)]
    world.leave(key([4]), priority=1)
    assert batch[1] not in list(world.snapshots)
    world.leave(key([5]), priority=1)
    assert list(world.snapshots)[:2] == [batch[0], others[1]]
