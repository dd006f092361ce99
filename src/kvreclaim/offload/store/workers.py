"""Threads that read and write a slot file, so that the engine does not wait for a disk."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from threading import Condition, Thread
from typing import Final

from kvreclaim.memory.prefix.index import BlockName
from kvreclaim.offload.store.jobs import DiskCounters, JobOutcome, JobResult, TierJob
from kvreclaim.offload.store.slot_file import SlotFile
from kvreclaim.offload.store.write_gate import WriteGate

LOGGER = logging.getLogger(__name__)

MAX_QUEUED_BYTES: Final = 256 << 20
DEADLINE_S: Final = 10.0
SYNC_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sync:
    """The job of a periodic sync."""


@dataclass(frozen=True, slots=True)
class Clear:
    """The job of clearing everything, which runs alone."""


class DiskWorkers:
    """Stores and loads of records, each with one result.

    Load threads only load; store threads take a waiting load first. The caller's buffer and slot belong to a
    job from `submit_...` until its result is taken by `poll`, however late. All methods are for the caller's
    thread only, and only `wait` and `close` wait.

    Args:
        slot_file:         used only here from now on
        num_read_threads, num_write_threads: >= 1 each
        max_queued_bytes:  of waiting stores; above, the oldest of them are dropped
        deadline_s:        after which a job is overdue
        max_stuck:         overdue threads before the disk counts as off; None for all but one
        sync_interval_s:   between two syncs, if anything was written
        on_done:           called by a worker after each result, to wake other waiters
        clock:             seconds; for deadlines and pauses, not for how long a thread sleeps
    """

    def __init__(
        self,
        slot_file: SlotFile,
        num_read_threads: int = 1,
        num_write_threads: int = 1,
        *,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        deadline_s: float = DEADLINE_S,
        max_stuck: int | None = None,
        sync_interval_s: float = SYNC_INTERVAL_S,
        on_done: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert min(num_read_threads, num_write_threads) > 0, "a thread of each kind is needed"
        self.slot_file = slot_file
        self.max_queued_bytes = max_queued_bytes
        self.deadline_s = deadline_s
        self.max_stuck = num_read_threads + num_write_threads - 1 if max_stuck is None else max_stuck
        self.sync_interval_s = sync_interval_s
        self._on_done = on_done
        self._clock = clock
        self._gate = WriteGate(clock)
        self._changed = Condition()
        self._loads: deque[TierJob] = deque()
        self._stores: deque[TierJob] = deque()
        self._queued_bytes = 0
        self._unfinished: dict[int, TierJob] = {}
        self._running: set[TierJob] = set()
        self._done: deque[JobResult] = deque()
        self._counters = DiskCounters()
        self._was_off = self._is_closing = self._is_closed = False
        self._is_clear_due = self._is_clearing = False
        self._next_sync: float | None = None
        kinds = [False] * num_read_threads + [True] * num_write_threads
        self._threads = [
            Thread(target=self._run, args=(stores,), name=f"kvreclaim-disk-{i}", daemon=True)
            for i, stores in enumerate(kinds)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def counters(self) -> DiskCounters:
        """Copy the counters."""
        with self._changed:
            return replace(self._counters)

    @property
    def takes_stores(self) -> bool:
        """Whether a store would be tried now."""
        return self._gate.is_open and not self._was_off and not self._is_closing

    @property
    def num_unfinished(self) -> int:
        """Jobs without a result, waiting or in progress."""
        with self._changed:
            return len(self._unfinished)

    @property
    def is_off(self) -> bool:
        """Whether so many threads hang that new jobs return at once; they may recover."""
        with self._changed:
            return self._check_off()

    def submit_store(self, job_id: int, slot: int, key: BlockName, payload: memoryview) -> None:
        """Write a record. Its result may be READ_ONLY, DROPPED or OFF without a try."""
        with self._changed:
            job = self._submitted(job_id, True, slot, key, payload)
            if not self._gate.is_open:
                self._finish(job, JobOutcome.READ_ONLY)
            elif self._is_closing or self._check_off():
                self._finish(job, JobOutcome.OFF)
            else:
                self._stores.append(job)
                self._queued_bytes += payload.nbytes
                while self._queued_bytes > self.max_queued_bytes:
                    self._finish(self._next_store(), JobOutcome.DROPPED)
            self._changed.notify_all()

    def submit_load(self, job_id: int, slot: int, key: BlockName, out: memoryview) -> None:
        """Read a record's payload into out; its content is undefined unless the outcome is OK."""
        with self._changed:
            job = self._submitted(job_id, False, slot, key, out)
            if self._is_closing or self._check_off():
                self._finish(job, JobOutcome.OFF)
            else:
                self._loads.append(job)
            self._changed.notify_all()

    def clear(self) -> None:
        """Remove all records, including those of stores in progress. Waiting jobs are cancelled; later ones
        run afterwards."""
        with self._changed:
            self._cancel_loads()
            self._cancel_stores(JobOutcome.DROPPED)
            self._is_clear_due = True
            self._changed.notify_all()

    @property
    def is_clearing(self) -> bool:
        """Whether records to be cleared may still exist."""
        with self._changed:
            return self._is_clear_due or self._is_clearing

    def _submitted(
        self, job_id: int, is_store: bool, slot: int, key: BlockName, buffer: memoryview
    ) -> TierJob:
        assert job_id not in self._unfinished, f"job {job_id} is under way"
        assert 0 <= slot < self.slot_file.num_slots, f"slot {slot} of {self.slot_file.num_slots}"
        job = self._unfinished[job_id] = TierJob(job_id, is_store, slot, key, buffer, self._clock())
        return job

    def poll(self) -> list[JobResult]:
        """Return the results since the last call."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
            return done

    def wait(self, timeout: float) -> bool:
        """Wait for a result, the end of all jobs, or the timeout. Returns: whether there is a result."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self._unfinished, timeout)
            return bool(self._done)

    def overdue(self) -> list[int]:
        """Jobs without a result for longer than deadline_s, oldest first."""
        latest = self._clock() - self.deadline_s
        with self._changed:
            self._check_off()
            late = takewhile(lambda job: job.submitted_at < latest, self._unfinished.values())
            return [job.job_id for job in late]

    def _check_off(self) -> bool:
        """Whether the disk is off. Once it is, no waiting job is tried any more."""
        latest = self._clock() - self.deadline_s
        num_stuck = sum(job.started_at is not None and job.started_at < latest for job in self._running)
        is_off = num_stuck > self.max_stuck
        if is_off != self._was_off:
            self._was_off = is_off
            LOGGER.warning(
                "%d reads and writes of blocks on disk have taken more than %.0f s: the disk is %s",
                num_stuck,
                self.deadline_s,
                "left alone until they end" if is_off else "used again",
            )
        if is_off:
            self._cancel_loads()
            self._cancel_stores(JobOutcome.OFF)
        return is_off

    def _cancel_loads(self) -> None:
        while self._loads:
            self._finish(self._loads.popleft(), JobOutcome.OFF)

    def _cancel_stores(self, outcome: JobOutcome) -> None:
        while self._stores:
            self._finish(self._next_store(), outcome)

    def _next_store(self) -> TierJob:
        job = self._stores.popleft()
        self._queued_bytes -= job.buffer.nbytes
        return job

    def _finish(self, job: TierJob, outcome: JobOutcome) -> None:
        """Set a job's result; the lock is held."""
        seconds = 0.0 if job.started_at is None else self._clock() - job.started_at
        del self._unfinished[job.job_id]
        self._counters.count(job, outcome)
        num_bytes = job.buffer.nbytes if outcome is JobOutcome.OK else 0
        self._done.append(JobResult(job.job_id, outcome, seconds, num_bytes))

    def close(self, timeout: float = 5.0) -> bool:
        """Accept no more jobs, cancel waiting loads, finish waiting stores in half of the time, sync, end the
        threads and close the file.

        Returns: False if a thread still hangs after timeout seconds; it and the file are then left alone,
        since another file might get the descriptor that it uses.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._is_closing = True
            self._cancel_loads()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._stores, timeout / 2)
            self._cancel_stores(JobOutcome.OFF)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        hanging = sum(thread.is_alive() for thread in self._threads)
        if hanging:
            LOGGER.warning("%d threads still wait for the disk of blocks; its file stays open", hanging)
            return False
        if not self._is_closed:
            self._is_closed = True
            self.slot_file.close()
        return True

    # In the threads.

    def _run(self, stores: bool) -> None:
        while (task := self._next_task(stores)) is not None:
            if isinstance(task, TierJob):
                self._carry_out(task)
            elif isinstance(task, Clear):
                self._cleared(self.slot_file.clear())
            else:
                self._synced(self.slot_file.sync())

    def _next_task(self, stores: bool) -> TierJob | Sync | Clear | None:
        """Wait for the next task; None at the end."""
        with self._changed:
            while True:
                if self._is_clear_due and not self._running:
                    self._is_clear_due, self._is_clearing = False, True
                    return Clear()
                if self._is_clear_due or self._is_clearing:
                    self._changed.wait()
                    continue
                if self._loads:
                    return self._started(self._loads.popleft())
                if stores and self._is_sync_due():
                    self._next_sync = None
                    return Sync()
                if stores and self._stores:
                    return self._started(self._next_store())
                if self._is_closing:
                    return None
                pause = None if self._next_sync is None else self._next_sync - self._clock()
                self._changed.wait(pause if stores else None)

    def _is_sync_due(self) -> bool:
        if self._next_sync is None:
            return False
        return self._clock() >= self._next_sync or (self._is_closing and not self._stores)

    def _started(self, job: TierJob) -> TierJob:
        job.started_at = self._clock()
        self._running.add(job)
        self._changed.notify_all()
        return job

    def _carry_out(self, job: TierJob) -> None:
        move = self.slot_file.write if job.is_store else self.slot_file.read
        try:
            outcome = move(job.slot, job.key, job.buffer)
        except Exception:  # the thread must go on, and the job must end
            LOGGER.exception("job %d on slot %d of the disk has failed", job.job_id, job.slot)
            outcome = JobOutcome.IO_ERROR
        with self._changed:
            self._running.remove(job)
            self._finish(job, outcome)
            if job.is_store:
                self._written(outcome)
            self._changed.notify_all()
        if self._on_done is not None:
            try:
                self._on_done()
            except Exception:  # the thread must go on
                LOGGER.exception("the result of job %d could not be reported", job.job_id)

    def _written(self, outcome: JobOutcome) -> None:
        """Update the disk's state after a store; the lock is held."""
        if outcome is JobOutcome.OK:
            self._gate.succeeded()
            if self._next_sync is None:
                self._next_sync = self._clock() + self.sync_interval_s
        else:
            self._failed(outcome)

    def _failed(self, outcome: JobOutcome) -> None:
        self._gate.failed(outcome)
        if not self._gate.is_open:
            self._cancel_stores(JobOutcome.READ_ONLY)

    def _cleared(self, outcome: JobOutcome) -> None:
        with self._changed:
            self._is_clearing = False
            if outcome is not JobOutcome.OK:
                LOGGER.warning("the file of blocks could not be made anew: %s", outcome.value)
                self._counters.io_errors += 1
            self._changed.notify_all()

    def _synced(self, outcome: JobOutcome) -> None:
        if outcome is not JobOutcome.OK:
            with self._changed:
                self._counters.io_errors += 1
                self._failed(outcome)
