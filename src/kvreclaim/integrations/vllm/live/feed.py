"""The page's feed inside vLLM: one reading of the pool serves every viewer, at a rate that costs little."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

from kvreclaim.integrations.vllm.live.recorder import StepRecorder
from kvreclaim.page.frames import Compaction, Snapshot, frame_event
from kvreclaim.page.viewer import MAX_VIEWERS, PERIOD_S, QUIET_S, Viewer

logger = logging.getLogger("vllm.kvreclaim")

SHARE = 0.02
"""Most of the time that is spent on reading the pool and writing frames, as a share."""
IDLE_S = 0.1
"""How often it is looked whether requests have ended meanwhile."""


class PluginFeed:
    """Lives in the page's loop. num_blocks: of the pool."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._frame: bytes | None = None
        self._came: asyncio.Queue[Snapshot] = asyncio.Queue()
        self._untold: list[Compaction] = []
        self.recorder: StepRecorder | None = None

    @property
    def is_full(self) -> bool:
        return len(self._viewers) >= MAX_VIEWERS

    def take(self, snapshot: Snapshot) -> None:
        """What the recorder has delivered; in the loop."""
        self._untold += snapshot.compactions
        self._came.put_nowait(snapshot)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, until it goes or the feed is closed."""
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif self._frame is not None:
            viewer.show(self._frame, [])
        try:
            async for chunk in viewer.events(self._num_blocks):
                yield chunk
        finally:
            self._viewers.discard(viewer)

    def close(self) -> None:
        """The engine ends."""
        for viewer in self._viewers:
            viewer.dismiss("draining")
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Until the last viewer has gone."""
        recorder = self.recorder
        assert recorder is not None, "somebody watches before the scheduler is there"
        recorder.watch(True)
        try:
            await self._show(recorder)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("the page's feed failed; the engine goes on")
            for viewer in self._viewers:
                viewer.dismiss("stopped")
        finally:
            recorder.watch(False)
            self._task = self._frame = None

    async def _show(self, recorder: StepRecorder) -> None:
        last, sent_s = b"", 0.0
        while self._viewers:
            snapshot = await self._next(recorder)
            began_s = time.perf_counter()
            news = False
            if snapshot is not None:
                body, frame = frame_event(snapshot)
                if news := body != last:
                    last, self._frame = body, frame
            news = news or time.monotonic() - sent_s >= QUIET_S
            if news:
                sent_s = time.monotonic()
            told, self._untold = self._untold, []
            for viewer in self._viewers:
                viewer.show(self._frame if news else None, told)
            spent_s = time.perf_counter() - began_s + (snapshot.look_s if snapshot else 0.0)
            await asyncio.sleep(max(PERIOD_S, spent_s / SHARE))

    async def _next(self, recorder: StepRecorder) -> Snapshot | None:
        """The pool after the next step, or as it is while there is none; None if neither comes in QUIET_S."""
        while not self._came.empty():  # of a step before; what it told is kept
            self._came.get_nowait()
        recorder.ask()
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._came.get(), IDLE_S)
            if (snapshot := recorder.look_idle()) is not None:
                self._untold += snapshot.compactions
                return snapshot
        return None
