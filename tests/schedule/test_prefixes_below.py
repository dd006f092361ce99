"""What is read from disk for whom, and how long it is waited for."""

from __future__ import annotations

from kvreclaim.schedule import ScheduledSequence
from kvreclaim.schedule.disk_prefixes import DiskPrefixIndex
from kvreclaim.schedule.snapshot_key import SnapshotKey


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
    assert not prefixes.has_missed(2), "it is said once"
    prefixes.leave(1)
    prefixes.leave(2)
    assert prefixes.num_deferred == prefixes.num_coming == 0


def test_nobody_waits_longer_than_told():
    prefixes, clock = below(wait_s=2.0)
    prefixes.know([(key().name, 100)])
    prefixes.ask(asker(1, key()))
    clock.now = 1.9
    assert prefixes.must_wait(1)
    clock.now = 2.0
    assert not prefixes.must_wait(1)
    prefixes.ask(asker(1, key()))
    assert not prefixes.must_wait(1), "who asks again has no more time"
    assert prefixes.arrived(key()), "it is still read, for others"


def test_what_is_not_asked_for():
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
