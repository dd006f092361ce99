"""The page's feed: one reading of the pool serves every viewer, and a slow viewer delays no other."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence

from kvreclaim.page.frames import Compaction
from kvreclaim.page.viewer import MAX_VIEWERS, Viewer


class Feed(ABC):
    """Reads the pool only while a viewer is connected.

    logger: gets what goes wrong
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._frame: bytes | None = None

    @property
    def is_full(self) -> bool:
        return len(self._viewers) >= MAX_VIEWERS

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, until it goes or the feed ends."""
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif self._frame is not None:
            viewer.show(self._frame, [])
        try:
            async for chunk in viewer.events():
                yield chunk
        finally:
            self._viewers.discard(viewer)

    @abstractmethod
    async def _read(self) -> str:
        """Show the pool until the last viewer leaves or the feed ends. Returns: the reason for the end."""

    async def _run(self) -> None:
        reason = "stopped"
        try:
            reason = await self._read()
        except Exception:
            self._logger.exception("the page's feed failed; the engine goes on")
        finally:
            self._task = self._frame = None
        self._dismiss(reason)

    def _show(self, frame: bytes | None, compactions: Sequence[Compaction]) -> None:
        """Queue for every viewer. frame: None if it is the last one still."""
        self._frame = frame or self._frame
        for viewer in self._viewers:
            viewer.show(frame, list(compactions))

    def _dismiss(self, reason: str) -> None:
        for viewer in self._viewers:
            viewer.dismiss(reason)
