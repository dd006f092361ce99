"""The page's feed: one reading of the engine serves every viewer, and nobody waits for a slow one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.errors import EngineDeadError
from kvreclaim.page.frames import frame_event
from kvreclaim.page.viewer import MAX_VIEWERS, PERIOD_S, QUIET_S, Viewer
from kvreclaim.server.errors import ApiError
from kvreclaim.server.page import snapshot as reading
from kvreclaim.server.service import Service

logger = logging.getLogger(__name__)


class EngineFeed:
    """Reads the engine five times a second while somebody watches, and not at all otherwise."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._frame: bytes | None = None

    def check_room(self) -> None:
        """Raises: ApiError 429 with too many viewers, 503 while the server shuts down."""
        if self._service.draining.is_set():
            raise ApiError(503, "the server is shutting down.")
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(
                429,
                f"{MAX_VIEWERS} pages watch already; close one of them.",
                headers={"retry-after": "5"},
            )

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, until it goes, the server shuts down or the engine stops."""
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif self._frame is not None:
            viewer.show(self._frame, [])
        try:
            async for chunk in viewer.events(self._service.engine.served.num_blocks):
                yield chunk
        finally:
            self._viewers.discard(viewer)

    async def _run(self) -> None:
        """Until the last viewer has gone."""
        engine, draining = self._service.engine, self._service.draining
        reason = "stopped"
        try:
            while self._viewers and not draining.is_set():  # somebody may come while the recording ends
                await engine.call(reading.begin)
                await self._show(engine, draining)
                await engine.call(reading.end)
            reason = "draining"
        except EngineDeadError:
            logger.info("the page's feed ends with the engine")
        except Exception:
            logger.exception("the page's feed failed")
        finally:
            self._task = self._frame = None
            for viewer in self._viewers:
                viewer.dismiss(reason)

    async def _show(self, engine: EngineClient, draining: asyncio.Event) -> None:
        """What happens, to all viewers."""
        last, sent_s = b"", 0.0
        while self._viewers and not draining.is_set():
            snapshot = await engine.call(reading.take)
            body, frame = await asyncio.to_thread(frame_event, snapshot)
            news = body != last or snapshot.at_s - sent_s >= QUIET_S
            if news:
                last, sent_s, self._frame = body, snapshot.at_s, frame
            for viewer in self._viewers:
                viewer.show(frame if news else None, snapshot.compactions)
            with suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), PERIOD_S)
