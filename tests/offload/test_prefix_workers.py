"""Threads over files of compressed prefixes: every store and load ends, whatever the disk does."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from kvreclaim.offload.store.directory import StoreDirectory
from kvreclaim.offload.store.file_io import FileIO
from kvreclaim.offload.store.jobs import JobOutcome
from kvreclaim.offload.store.namespace import FIELDS, Namespace
from kvreclaim.offload.store.prefix_files import PrefixFiles
from kvreclaim.offload.store.prefix_workers import Loaded, PrefixWorkers, Stored
from kvreclaim.offload.store.session_file import SessionFile, save_whole

NAMES = [f"{number:064x}" for number in range(8)]
FIELDS_HERE = dict.fromkeys(FIELDS, "here")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def files(tmp_path):
    namespace = Namespace(FIELDS_HERE)
    with StoreDirectory(tmp_path) as place:
        place._make_namespace(namespace)
    return PrefixFiles(tmp_path, namespace, 100_000, 50_000)


def content(number=0, size=1000):
    return SessionFile(FIELDS_HERE, {"number": number}, {"blocks": torch.full((size,), number)})


def results(workers, count):
    found = []
    while len(found) < count:
        workers.wait(1.0)
        found += workers.poll()
    return found


def test_what_is_stored_is_loaded(files):
    workers = PrefixWorkers(files)
    workers.store(NAMES[0], content(7))
    (stored,) = results(workers, 1)
    assert isinstance(stored, Stored)
    assert stored.outcome is JobOutcome.OK
    assert files.scan() == {NAMES[0]: stored.num_bytes}
    workers.load(NAMES[0], lambda file: file.facts["number"] == 7)
    (loaded,) = results(workers, 1)
    assert isinstance(loaded, Loaded)
    assert loaded.file.tensors["blocks"].equal(torch.full((1000,), 7))
    workers.load(NAMES[0], lambda file: file.facts["number"] == 8)
    (other,) = results(workers, 1)
    assert (other.file, other.is_gone) == (None, True)
    workers.load(NAMES[0], lambda _: True)
    (gone,) = results(workers, 1)
    assert (gone.file, gone.is_gone) == (None, True)
    counters = workers.counters
    assert (counters.corrupt, counters.lost, counters.loads, counters.stores) == (1, 1, 1, 1)
    workers.close()


def test_the_share_is_a_bound_and_the_oldest_goes(files):
    for number in range(6):
        outcome, _, gone = files.store(NAMES[number], content(number))
        assert outcome is JobOutcome.OK
        assert gone == ([NAMES[number - 4]] if number >= 4 else [])
        os.utime(files._path(NAMES[number]), (number, number))  # a disk's clock may be coarse
    assert len(files.scan()) == 4
    assert sum(files.scan().values()) <= 50_000
    assert files.store(NAMES[7], content(7, 10_000))[0] is JobOutcome.DROPPED
    assert NAMES[5] in files.scan(), "what does not fit takes no other's place"


def test_the_size_of_all_is_a_bound(files, tmp_path):
    (tmp_path / files.namespace.hex / "slots.kv").write_bytes(bytes(80_000))
    for number in range(4):
        files.store(NAMES[number], content(number))
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 80_000 < used <= 100_000


def test_what_was_half_written_is_removed(files, tmp_path):
    left = tmp_path / files.namespace.hex / f".{NAMES[3]}.prefix.abc"
    left.write_bytes(bytes(60_000))
    assert files.store(NAMES[0], content())[0] is JobOutcome.OK
    assert not left.exists()


def test_another_process_has_the_directory(files, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("kvreclaim.offload.store.prefix_files.PATIENCE_S", 0.05)
    with StoreDirectory(tmp_path):
        assert files.store(NAMES[0], content())[0] is JobOutcome.DROPPED
        assert files.scan() == {}
    assert "they cannot be listed" in caplog.text
    assert files.store(NAMES[0], content())[0] is JobOutcome.OK


def test_a_disk_that_takes_no_more_bytes_is_an_error_of_the_disk(tmp_path):
    class Full(FileIO):
        def pwritev(self, fd, buffers, offset):
            return min(100, super().pwritev(fd, buffers, offset)) if offset == 0 else 0

    path = tmp_path / "a.session"
    with pytest.raises(OSError, match="takes no more bytes"):
        save_whole(content().pack(), path, Full())
    assert list(tmp_path.iterdir()) == []


class Held:
    """A stand-in for files: calls return only once `free` is set."""

    def __init__(self):
        self.free, self.begun = threading.Event(), threading.Event()

    def store(self, name, file):
        self.begun.set()
        self.free.wait()
        return JobOutcome.OK, 1, []

    def load(self, name, is_it):
        self.begun.set()
        self.free.wait()
        return content()

    def clear(self):
        return JobOutcome.OK


def test_what_hangs_is_left_alone_until_it_returns():
    held, clock = Held(), Clock()
    workers = PrefixWorkers(held, deadline_s=10.0, clock=clock)
    workers.load(NAMES[0], lambda _: True)
    held.begun.wait()
    workers.load(NAMES[1], lambda _: True)
    assert workers.poll() == []
    clock.now = 11.0
    (given_up,) = workers.poll()
    assert (given_up.name, given_up.file, given_up.is_gone) == (NAMES[1], None, False)
    workers.load(NAMES[2], lambda _: True)
    assert [each.name for each in workers.poll()] == [NAMES[2]]
    held.free.set()
    (late,) = results(workers, 1)
    assert late.name == NAMES[0]
    assert late.file is not None
    workers.load(NAMES[3], lambda _: True)
    assert results(workers, 1)[0].file is not None
    workers.close()


def test_stores_that_wait_are_bounded_and_the_oldest_dropped():
    held = Held()
    workers = PrefixWorkers(held, max_queued_bytes=20_000)
    workers.store(NAMES[0], content())
    held.begun.wait()
    for name in NAMES[1:5]:
        workers.store(name, content())
    dropped = workers.poll()
    assert [(each.name, each.outcome) for each in dropped] == [
        (NAMES[1], JobOutcome.DROPPED),
        (NAMES[2], JobOutcome.DROPPED),
    ]
    held.free.set()
    assert [each.name for each in results(workers, 3)] == [NAMES[0], NAMES[3], NAMES[4]]
    assert workers.counters.dropped == 2
    workers.close()


def test_a_clear_comes_behind_the_store_that_is_under_way():
    held = Held()
    workers = PrefixWorkers(held)
    workers.store(NAMES[0], content())
    held.begun.wait()
    workers.store(NAMES[1], content())
    workers.clear()
    assert workers.is_clearing
    assert [each.name for each in workers.poll()] == [NAMES[1]]
    held.free.set()
    results(workers, 1)
    workers.close()
    assert not workers.is_clearing


def test_closing_waits_for_nothing_that_hangs(caplog):
    held = Held()
    workers = PrefixWorkers(held)
    workers.store(NAMES[0], content())
    held.begun.wait()
    workers.store(NAMES[1], content())
    workers.remove(NAMES[2])
    workers.close(0.1)
    assert "2 changes of compressed prefixes on disk are left out" in caplog.text
    assert [each.name for each in workers.poll()] == [NAMES[1]]
    assert not workers.takes_stores()
    held.free.set()
