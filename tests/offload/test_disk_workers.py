"""Every job has one result, whatever the disk does; nothing here waits for a time to pass."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvreclaim.offload.store.jobs import JobOutcome, JobResult
from kvreclaim.offload.store.workers import DiskWorkers

from .slot_files import PAYLOAD, FailingIO, chain, empty, open_slots, payload

LONG_S = 60.0
"""For what does happen; a test that waits so long has failed."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Workers over a file of eight slots on a disk that fails on demand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.io, self.clock, self.workers = FailingIO(), Clock(), None

    def start(self, **options: object) -> DiskWorkers:
        self.workers = DiskWorkers(open_slots(self.directory, io=self.io), clock=self.clock, **options)
        return self.workers

    def results(self, count: int) -> dict[int, JobOutcome]:
        found: list[JobResult] = []
        while len(found) < count:
            assert self.workers.wait(LONG_S), f"{len(found)} of {count} results"
            found += self.workers.poll()
        assert len({done.job_id for done in found}) == len(found) == count
        return {done.job_id: done.outcome for done in found}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.io.hold.set()
    if bench.workers is not None:
        assert bench.workers.close(LONG_S)


def test_stores_come_back_as_loads(bench: Bench) -> None:
    woken = threading.Semaphore(0)
    workers, keys = bench.start(on_done=woken.release), chain(4)
    for slot, key in enumerate(keys):
        workers.submit_store(slot, slot, key, payload(key))
    assert bench.results(4) == dict.fromkeys(range(4), JobOutcome.OK)
    outs = [empty() for _ in keys]
    for slot, key in enumerate(keys):
        workers.submit_load(10 + slot, slot, key, outs[slot])
    workers.submit_load(20, 0, keys[1], empty())
    assert bench.results(5) == {10: "ok", 11: "ok", 12: "ok", 13: "ok", 20: "other"}
    assert outs == [payload(key) for key in keys]
    for _ in range(9):
        assert woken.acquire(timeout=LONG_S)
    counters = workers.counters
    assert (counters.stores, counters.loads, counters.corrupt) == (4, 4, 1)
    assert counters.stored_bytes == counters.loaded_bytes == 4 * PAYLOAD
    assert not workers.wait(LONG_S)
    assert workers.poll() == []
    assert workers.num_unfinished == 0


def stuck(bench: Bench, submit: Callable[[], None], threads: int) -> None:
    """Let jobs hang in so many threads."""
    bench.io.hold.clear()
    submit()
    for _ in range(threads):
        assert bench.io.entered.acquire(timeout=LONG_S)


def test_a_load_passes_stores_and_stores_never_hold_up_loads(bench: Bench) -> None:
    workers, (key, other) = bench.start(), chain(2)
    workers.submit_store(0, 0, key, payload(key))
    bench.results(1)
    stuck(bench, lambda: workers.submit_store(1, 1, other, payload(other)), 1)
    workers.submit_load(2, 0, key, empty())
    assert bench.io.entered.acquire(timeout=LONG_S)
    bench.io.hold.set()
    assert bench.results(2) == {1: "ok", 2: "ok"}


def test_a_loading_thread_stores_nothing(bench: Bench) -> None:
    workers, keys = bench.start(), chain(2)
    stuck(bench, lambda: [workers.submit_store(i, i, k, payload(k)) for i, k in enumerate(keys)], 1)
    workers.submit_load(9, 7, keys[0], empty())
    assert bench.io.entered.acquire(timeout=LONG_S)
    assert not bench.io.entered.acquire(blocking=False)
    assert workers.num_unfinished == 3
    bench.io.hold.set()
    assert bench.results(3) == {0: "ok", 1: "ok", 9: "blank"}


def test_the_oldest_stores_in_the_queue_are_dropped_and_loads_are_not(bench: Bench) -> None:
    workers, keys = bench.start(max_queued_bytes=2 * PAYLOAD), chain(5)
    stuck(bench, lambda: workers.submit_store(0, 0, keys[0], payload(keys[0])), 1)
    for i in range(1, 5):
        workers.submit_store(i, i, keys[i], payload(keys[i]))
    for i in range(5):
        workers.submit_load(10 + i, 7, keys[0], empty())
    assert bench.results(2) == {1: "dropped", 2: "dropped"}
    bench.io.hold.set()
    found = bench.results(8)
    assert [found[i] for i in (0, 3, 4)] == ["ok"] * 3
    assert workers.counters.dropped == 2


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EIO, "short"])
def test_after_three_failures_nothing_is_written_for_a_while(
    bench: Bench, caplog: pytest.LogCaptureFixture, failure: int | str
) -> None:
    workers, keys = bench.start(), chain(3)

    def fail(is_on: bool) -> None:
        bench.io.write_error = failure if is_on and isinstance(failure, int) else 0
        bench.io.short = 4000 if is_on and failure == "short" else 0

    def store(job_id: int) -> JobOutcome:
        workers.submit_store(job_id, 1, keys[1], payload(keys[1]))
        return bench.results(1)[job_id]

    workers.submit_store(0, 0, keys[0], payload(keys[0]))
    bench.results(1)
    fail(True)
    reason = {errno.ENOSPC: "no_space", errno.EIO: "io_error", "short": "short"}[failure]
    with caplog.at_level(logging.WARNING):
        assert [store(i) for i in range(1, 5)] == [reason] * 3 + ["read_only"]
        assert len(caplog.records) == 1
    fail(False)
    workers.submit_load(5, 0, keys[0], empty())
    assert bench.results(1) == {5: "ok"}
    fail(True)
    pauses = []
    for i in range(8):
        pause = 0
        while workers._gate.is_open is False:
            bench.clock.now += 60
            pause += 60
        pauses.append(pause)
        assert store(10 + i) == reason
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    bench.clock.now += 3600
    fail(False)
    assert store(30) == "ok"
    assert workers.counters.io_errors == 11
    assert workers.counters.dropped == 1


def test_stores_that_wait_are_given_up_with_the_disk(bench: Bench) -> None:
    workers, keys = bench.start(), chain(5)
    stuck(bench, lambda: [workers.submit_store(i, i, k, payload(k)) for i, k in enumerate(keys)], 1)
    bench.io.write_error = errno.ENOSPC
    bench.io.hold.set()
    found = bench.results(5)
    assert [found[i] for i in range(5)] == ["no_space"] * 3 + ["read_only"] * 2


def test_a_stuck_disk_is_reported_and_left_alone_until_it_answers(bench: Bench) -> None:
    workers, keys = bench.start(deadline_s=10.0), chain(3)
    workers.submit_store(0, 0, keys[0], payload(keys[0]))
    bench.results(1)
    stuck(bench, lambda: workers.submit_load(1, 0, keys[0], empty()), 1)
    bench.clock.now += 10.5
    assert workers.overdue() == [1]
    assert not workers.is_off
    workers.submit_load(2, 0, keys[0], empty())
    assert bench.io.entered.acquire(timeout=LONG_S)
    workers.submit_store(3, 1, keys[1], payload(keys[1]))
    assert workers.overdue() == [1]
    bench.clock.now += 10.5
    assert workers.overdue() == [1, 2]
    assert workers.is_off
    workers.submit_load(4, 0, keys[0], empty())
    workers.submit_store(5, 1, keys[1], payload(keys[1]))
    assert bench.results(3) == {3: "off", 4: "off", 5: "off"}
    bench.io.hold.set()
    assert bench.results(2) == {1: "ok", 2: "ok"}
    assert not workers.is_off
    workers.submit_load(6, 0, keys[0], empty())
    assert bench.results(1) == {6: "ok"}


def test_a_result_says_how_much_and_how_long_without_the_queue(bench: Bench) -> None:
    workers, keys = bench.start(), chain(2)
    stuck(bench, lambda: [workers.submit_store(i, i, k, payload(k)) for i, k in enumerate(keys)], 1)
    bench.clock.now += 3
    bench.io.hold.set()
    while workers.num_unfinished:
        workers.wait(LONG_S)
    workers.submit_load(2, 7, keys[0], empty())
    while workers.num_unfinished:
        workers.wait(LONG_S)
    assert workers.poll() == [
        JobResult(0, JobOutcome.OK, 3.0, PAYLOAD),
        JobResult(1, JobOutcome.OK, 0.0, PAYLOAD),
        JobResult(2, JobOutcome.BLANK, 0.0, 0),
    ]


def test_what_is_written_is_synced_by_and_by(bench: Bench) -> None:
    workers, keys = bench.start(sync_interval_s=60.0), chain(3)
    workers.submit_store(0, 0, keys[0], payload(keys[0]))
    bench.results(1)
    assert bench.io.num_syncs == 0
    bench.clock.now += 60
    workers.submit_store(1, 1, keys[1], payload(keys[1]))
    bench.results(1)
    assert bench.io.num_syncs == 2
    bench.io.sync_error = errno.EIO
    bench.clock.now += 60
    workers.submit_store(2, 2, keys[2], payload(keys[2]))
    bench.results(1)
    assert workers.counters.io_errors == 1


def test_closing_finishes_stores_and_gives_up_loads(bench: Bench) -> None:
    workers, keys = bench.start(), chain(4)
    bench.io.hold.clear()
    workers.submit_store(0, 0, keys[0], payload(keys[0]))
    assert bench.io.entered.acquire(timeout=LONG_S)  # the thread for stores, which takes loads as well
    workers.submit_load(9, 7, keys[0], empty())
    assert bench.io.entered.acquire(timeout=LONG_S)
    for slot, key in enumerate(keys[1:], 1):
        workers.submit_store(slot, slot, key, payload(key))
    workers.submit_load(10, 0, keys[0], empty())
    closing = threading.Thread(target=workers.close, args=(LONG_S,))
    closing.start()
    while 10 not in (outcomes := bench.results(1)):
        pass
    assert outcomes == {10: "off"}
    bench.io.hold.set()
    closing.join()
    assert bench.results(5) == {0: "ok", 1: "ok", 2: "ok", 3: "ok", 9: "blank"}
    assert bench.io.num_syncs == 2
    workers.submit_load(11, 0, keys[0], empty())
    workers.submit_store(12, 0, keys[0], payload(keys[0]))
    assert bench.results(2) == {11: "off", 12: "off"}
    again = open_slots(bench.directory)
    assert [each.record for each in again.recover()] == keys
    again.close()


def test_closing_leaves_a_stuck_disk_behind(bench: Bench) -> None:
    workers, keys = bench.start(), chain(3)
    stuck(bench, lambda: [workers.submit_store(i, i, k, payload(k)) for i, k in enumerate(keys)], 1)
    assert workers.close(timeout=0.05) is False
    assert bench.results(2) == {1: "off", 2: "off"}
    assert workers.num_unfinished == 1
    bench.io.hold.set()
    assert bench.results(1) == {0: "ok"}


def test_a_fault_of_our_own_ends_the_job_and_not_the_thread(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    workers, (key,) = bench.start(), chain(1)
    workers.submit_store(0, 0, key, memoryview(b"too short"))
    assert bench.results(1) == {0: "io_error"}
    assert "has failed" in caplog.text
    workers.submit_store(1, 0, key, payload(key))
    assert bench.results(1) == {1: "ok"}


def test_a_report_that_fails_ends_no_thread(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no report")

    workers, keys = bench.start(on_done=fail), chain(8)
    for i, key in enumerate(keys):
        workers.submit_load(i, i, key, empty())
    assert set(bench.results(8).values()) == {"blank"}
    assert "could not be reported" in caplog.text


def test_clearing_comes_behind_what_is_under_way_and_before_what_comes_later(bench: Bench) -> None:
    workers, keys = bench.start(), chain(6)
    stuck(bench, lambda: workers.submit_store(0, 0, keys[0], payload(keys[0])), 1)
    workers.submit_store(1, 1, keys[1], payload(keys[1]))
    workers.clear()
    assert bench.results(1) == {1: "dropped"}
    workers.submit_store(2, 2, keys[0], payload(keys[0]))
    assert workers.is_clearing
    bench.io.hold.set()
    assert bench.results(2) == {0: "ok", 2: "ok"}
    assert not workers.is_clearing
    workers.submit_load(3, 0, keys[0], empty())
    workers.submit_load(4, 2, keys[0], empty())
    assert bench.results(2) == {3: "blank", 4: "ok"}
    assert workers.close(LONG_S)
    again = open_slots(bench.directory)
    assert [each.slot for each in again.recover()] == [2]
    again.close()


def test_a_disk_that_cannot_clear_is_counted(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    workers, (key,) = bench.start(), chain(1)
    bench.io.allocate_error = errno.EIO
    workers.clear()
    workers.submit_store(0, 0, key, payload(key))
    bench.results(1)
    assert workers.counters.io_errors >= 1
    assert "could not be made anew: io_error" in caplog.text
