"""The page's feed: snapshots taken by the engine's thread between two steps."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.errors import EngineDeadError
from kvreclaim.page.feed import Feed
from kvreclaim.page.frames import frame_event
from kvreclaim.page.viewer import MAX_VIEWERS, PERIOD_S, QUIET_S
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.page import snapshot as reading
from kvreclaim.server.shared.service import Service

logger = logging.getLogger(__name__)


class EngineFeed(Feed):
    """Reads the engine five times a second while there are viewers."""

    def __init__(self, service: Service) -> None:
        super().__init__(logger)
        self._service = service

    def check_room(self) -> None:
        """Raises: ApiError 429 with too many viewers, 503 while the server shuts down."""
        if self._service.draining.is_set():
            raise ApiError(503, "the server is shutting down.")
        if self.is_full:
            raise ApiError(
                429,
                f"{MAX_VIEWERS} pages watch already; close one of them.",
                headers={"retry-after": "5"},
            )

    async def _read(self) -> str:
        engine, draining = self._service.engine, self._service.draining
        try:
            while self._viewers and not draining.is_set():  # a viewer may come while the recording ends
                await engine.call(reading.begin)
                await self._show_all(engine, draining)
                await engine.call(reading.end)
        except EngineDeadError:
            logger.info("the page's feed ends with the engine")
            return "stopped"
        return "draining"

    async def _show_all(self, engine: EngineClient, draining: asyncio.Event) -> None:
        last, sent_s = b"", 0.0
        while self._viewers and not draining.is_set():
            snapshot = await engine.call(reading.take)
            body, frame = await asyncio.to_thread(frame_event, snapshot)
            news = body != last or snapshot.at_s - sent_s >= QUIET_S
            if news:
                last, sent_s = body, snapshot.at_s
            self._show(frame if news else None, snapshot.compactions)
            with suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), PERIOD_S)
