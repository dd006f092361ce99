"""Reads of the pool by the scheduler's or the page's thread, such that neither waits.

While requests run, the scheduler's thread reads at the end of a step, if the page's thread has set a flag.
While there are none, no step comes: the page's thread reads itself, and drops the result if a step began
meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from kvreclaim.page.frames import Compaction, Snapshot, compaction_of
from kvreclaim.page.viewer import MAX_PENDING
from kvreclaim.schedule import Pass

logger = logging.getLogger("vllm.kvreclaim")

FIRST_BLOCK = 1
"""vLLM's block 0 belongs to no request, and is no part of the pool here."""

Look = Callable[[list[Compaction]], Snapshot]
"""Reads the pool as it is, for a snapshot with these compactions."""


class StepRecorder:
    """Args:
    look:    in the scheduler's thread between two steps, or in any while no request is there
    is_idle: whether no request is there; from any thread
    deliver: takes a snapshot from the scheduler's thread, at once
    """

    def __init__(self, look: Look, is_idle: Callable[[], bool], deliver: Callable[[Snapshot], None]) -> None:
        self._look = look
        self._is_idle = is_idle
        self._deliver = deliver
        self._steps = 0
        self._is_requested = False
        self._watched = False
        self._failed = False
        self._compactions: list[Compaction] = []

    # The scheduler's thread.

    def begin_step(self) -> None:
        """Note the beginning of a step, before the pool changes."""
        self._steps += 1

    def passed(self, passes: Iterable[Pass[str]]) -> None:
        """Record passes that have changed the pool."""
        if self._watched:
            new = [compaction_of(done.seq_id, done, FIRST_BLOCK) for done in passes]
            self._compactions = [*self._compactions, *new][-MAX_PENDING:]

    def end_step(self) -> None:
        """Record that requests which ended in a step gave their blocks back."""
        if not self._is_requested:
            return
        self._is_requested = False
        try:
            self._deliver(self._look(self._take()))
        except Exception:  # a mistake of the page must not end the engine
            logger.exception("kvreclaim: the page's view of the pool has failed; the engine goes on without")
            self._failed = True

    # The page's thread.

    def watch(self, on: bool) -> None:
        """Start or stop recording compactions; earlier ones are dropped."""
        self._watched = on
        self._is_requested = False
        self._compactions = []

    def request(self) -> None:
        """Request a snapshot from the next step."""
        self._is_requested = not self._failed

    def look_idle(self) -> Snapshot | None:
        """Return the pool if there are no requests; None if there are, or one arrived during the read."""
        steps = self._steps
        if not self._is_idle():
            return None
        passes = self._take()
        with suppress(RuntimeError):  # a dictionary changed while it was read
            snapshot = self._look(passes)
            if self._steps == steps:
                return snapshot
        self._compactions = [*passes, *self._compactions]
        return None

    def _take(self) -> list[Any]:
        taken, self._compactions = self._compactions, []
        return taken
