"""The feed of the page inside vLLM: snapshots at a rate that costs little."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from kvreclaim.integrations.vllm.live.recorder import StepRecorder
from kvreclaim.page.feed import Feed
from kvreclaim.page.frames import Compaction, Snapshot, frame_event
from kvreclaim.page.viewer import PERIOD_S, QUIET_S

logger = logging.getLogger("vllm.kvreclaim")

SHARE = 0.02
"""Most of the time that is spent on reading the pool and writing frames, as a share."""
IDLE_S = 0.1
"""Seconds between checks whether requests have ended."""


class PluginFeed(Feed):
    """Lives in the page's loop. recorder: reads the pool"""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__(logger)
        self._recorder = recorder
        self._came: asyncio.Queue[Snapshot] = asyncio.Queue()
        self._unsent: list[Compaction] = []

    def take(self, snapshot: Snapshot) -> None:
        """Take the recorder's snapshot; runs in the event loop."""
        self._unsent += snapshot.compactions
        self._came.put_nowait(snapshot)

    def close(self) -> None:
        """End all feeds when the engine ends."""
        self._dismiss("draining")
        if self._task is not None:
            self._task.cancel()

    async def _read(self) -> str:
        self._recorder.watch(True)
        try:
            await self._show_all()
        finally:
            self._recorder.watch(False)
        return "draining"

    async def _show_all(self) -> None:
        last, event, sent_s = b"", b"", 0.0
        while self._viewers:
            snapshot = await self._next()
            began_s = time.perf_counter()
            news = False
            if snapshot is not None:
                body, frame = frame_event(snapshot)
                if news := body != last:
                    last, event = body, frame
            news = news or time.monotonic() - sent_s >= QUIET_S
            if news:
                sent_s = time.monotonic()
            passes, self._unsent = self._unsent, []
            self._show(event if news else None, passes)
            spent_s = time.perf_counter() - began_s + (snapshot.look_s if snapshot else 0.0)
            await asyncio.sleep(max(PERIOD_S, spent_s / SHARE))

    async def _next(self) -> Snapshot | None:
        """The pool after the next step, or as it is while there is none; None if neither comes in QUIET_S."""
        while not self._came.empty():  # of a step before; its compactions are kept
            self._came.get_nowait()
        self._recorder.request()
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._came.get(), IDLE_S)
            if (snapshot := self._recorder.look_idle()) is not None:
                self._unsent += snapshot.compactions
                return snapshot
        return None
