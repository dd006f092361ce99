"""Two threads for files of compressed prefixes: a reader and a writer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Condition, Thread

from kvreclaim.offload.store.jobs import DiskCounters, JobOutcome
from kvreclaim.offload.store.prefix_files import PrefixFiles
from kvreclaim.offload.store.session_file import SessionFile
from kvreclaim.offload.store.workers import DEADLINE_S, MAX_QUEUED_BYTES
from kvreclaim.offload.store.write_gate import WriteGate

LOGGER = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefixCounters(DiskCounters):
    """Counts of files. corrupt: damaged or of something else; lost: removed by another process; dropped:
    includes those without room; removed: files that made room for others."""

    lost: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A name, and whether its file exists; gone: names removed for it."""

    name: str
    outcome: JobOutcome
    num_bytes: int
    gone: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Contents of a file; None: nothing usable. is_gone: permanently."""

    name: str
    file: SessionFile | None
    is_gone: bool
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Task:
    """do: work of the thread; result: makes the result of a cancelled task, None if it must run while there
    are threads; num_bytes: that it holds."""

    do: Callable[[], Stored | Loaded | None]
    result: Callable[[JobOutcome], Stored | Loaded] | None = None
    num_bytes: int = 0
    started_at: float = 0.0


class PrefixWorkers:
    """Each store and load has one result (`poll`). Only `wait` and `close` wait.

    A failed store is counted, and after some in a row none are tried for a while (WriteGate). While a disk
    call hangs for longer than deadline_s, its thread's tasks are cancelled.

    Args:
        files:            used only here from now on
        max_queued_bytes: of waiting stores; above, the oldest of them are dropped
    """

    def __init__(
        self,
        files: PrefixFiles,
        *,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files, self.max_queued_bytes, self.deadline_s = files, max_queued_bytes, deadline_s
        self._clock, self._gate = clock, WriteGate(clock)
        self._changed = Condition()
        self._queues: dict[str, deque[_Task]] = {"load": deque(), "store": deque()}
        self._running: dict[str, _Task] = {}
        self._done: deque[Stored | Loaded] = deque()
        self._counters = PrefixCounters()
        self._is_closing = False
        self._num_clearing = 0
        self._threads = [
            Thread(target=self._run, args=(kind,), name=f"kvreclaim-prefix-{kind}", daemon=True)
            for kind in self._queues
        ]
        for thread in self._threads:
            thread.start()

    @property
    def counters(self) -> PrefixCounters:
        """Copy the counters."""
        with self._changed:
            return replace(self._counters)

    @property
    def is_clearing(self) -> bool:
        """Whether files to be cleared may still exist."""
        with self._changed:
            return self._num_clearing > 0

    def takes_stores(self) -> bool:
        """Whether a store would be tried now; otherwise it is counted as dropped."""
        with self._changed:
            takes = self._gate.is_open and not self._is_closing and not self._is_stuck("store")
            self._counters.dropped += not takes
            return takes

    def store(self, name: str, file: SessionFile) -> None:
        """Write a file; its tensors must not change any more."""
        num_bytes = sum(tensor.nbytes for tensor in file.tensors.values())

        def dropped(outcome: JobOutcome) -> Stored:
            self._counters.dropped += 1
            return Stored(name, outcome, 0)

        with self._changed:
            self._submit("store", _Task(lambda: self._store(name, file), dropped, num_bytes))
            queue = self._queues["store"]
            while sum(task.num_bytes for task in queue) > self.max_queued_bytes:
                oldest = next(task for task in queue if task.num_bytes)
                queue.remove(oldest)
                self._give_up(oldest, JobOutcome.DROPPED)

    def load(self, name: str, is_it: Callable[[SessionFile], bool]) -> None:
        """Read a file and check that it is the intended one."""
        task = _Task(lambda: self._load(name, is_it), lambda _: Loaded(name, None, is_gone=False))
        with self._changed:
            self._submit("load", task)

    def touch(self, name: str) -> None:
        """Record a use."""
        with self._changed:
            self._submit("store", _Task(lambda: self.files.touch(name)))

    def remove(self, name: str) -> None:
        """Remove a file, after a store of it that is in progress."""
        with self._changed:
            self._submit("store", _Task(lambda: self.files.remove(name)))

    def clear(self) -> None:
        """Remove all files, including those of stores in progress."""
        with self._changed:
            self._cancel("load", JobOutcome.DROPPED)
            self._cancel("store", JobOutcome.DROPPED)
            self._num_clearing += 1
            self._submit("store", _Task(self._clear))

    def poll(self) -> list[Stored | Loaded]:
        """Return the results since the last call."""
        with self._changed:
            for kind in self._queues:
                if self._is_stuck(kind):
                    self._cancel(kind, JobOutcome.OFF)
            done = list(self._done)
            self._done.clear()
            return done

    def wait(self, timeout: float) -> None:
        """Wait for a result or the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Accept no more tasks, cancel waiting loads, and finish waiting stores, removals and uses in half of
        the time; a warning counts those that are left."""
        end = time.monotonic() + timeout
        with self._changed:
            self._is_closing = True
            self._cancel("load", JobOutcome.OFF)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queues["store"], timeout / 2)
            if left := len(self._queues["store"]):
                LOGGER.warning("%d changes of compressed prefixes on disk are left out: it is too slow", left)
            self._cancel("store", JobOutcome.OFF)
            self._queues["store"].clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    # The callers hold the lock.

    def _submit(self, kind: str, task: _Task) -> None:
        if self._is_closing or (task.result is not None and self._is_stuck(kind)):
            self._give_up(task, JobOutcome.OFF)
        else:
            self._queues[kind].append(task)
        self._changed.notify_all()

    def _is_stuck(self, kind: str) -> bool:
        running = self._running.get(kind)
        return running is not None and running.started_at < self._clock() - self.deadline_s

    def _cancel(self, kind: str, outcome: JobOutcome) -> None:
        """Cancel the waiting tasks that may be cancelled."""
        queue = self._queues[kind]
        for task in [task for task in queue if task.result is not None]:
            queue.remove(task)
            self._give_up(task, outcome)

    def _give_up(self, task: _Task, outcome: JobOutcome) -> None:
        if task.result is not None:
            self._done.append(task.result(outcome))

    # In the threads.

    def _run(self, kind: str) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queues[kind] or self._is_closing)
                if not self._queues[kind]:
                    return
                task = self._running[kind] = self._queues[kind].popleft()
                task.started_at = self._clock()
                self._changed.notify_all()
            try:
                result = task.do()
            except Exception:  # the thread must go on, and the task must end
                LOGGER.exception("a compressed prefix could not be moved to or from disk")
                result = None if task.result is None else task.result(JobOutcome.IO_ERROR)
            with self._changed:
                del self._running[kind]
                if result is not None:
                    self._done.append(result)
                self._changed.notify_all()

    def _store(self, name: str, file: SessionFile) -> Stored:
        outcome, num_bytes, gone = self.files.store(name, file)
        with self._changed:
            counters = self._counters
            counters.removed += len(gone)
            if outcome is JobOutcome.OK:
                self._gate.succeeded()
                counters.stores += 1
                counters.stored_bytes += num_bytes
            elif outcome.is_failure:
                self._gate.failed(outcome)
                counters.io_errors += 1
                if not self._gate.is_open:
                    self._cancel("store", JobOutcome.READ_ONLY)
            else:
                counters.dropped += 1
        return Stored(name, outcome, num_bytes, gone)

    def _load(self, name: str, is_it: Callable[[SessionFile], bool]) -> Loaded:
        started = self._clock()
        found = self.files.load(name, is_it)
        seconds = self._clock() - started
        with self._changed:
            counters = self._counters
            if isinstance(found, SessionFile):
                counters.loads += 1
                counters.loaded_bytes += sum(tensor.nbytes for tensor in found.tensors.values())
                return Loaded(name, found, is_gone=False, seconds=seconds)
            counters.lost += found is JobOutcome.BLANK
            counters.io_errors += found.is_failure
            counters.corrupt += found.is_corrupt and found is not JobOutcome.BLANK
        return Loaded(name, None, is_gone=found.is_corrupt)

    def _clear(self) -> None:
        outcome = self.files.clear()
        with self._changed:
            self._num_clearing -= 1
            if outcome is not JobOutcome.OK:
                LOGGER.warning("files of compressed prefixes could not be removed: %s", outcome.value)
                self._counters.io_errors += 1
