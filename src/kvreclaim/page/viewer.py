"""One connected browser, which delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvreclaim.page.frames import Compaction, compactions_json, event

MAX_VIEWERS = 32
MAX_PENDING = 256
"""Compactions kept for a viewer that does not read; older ones are dropped."""
PERIOD_S = 0.2
"""Between two frames at least."""
QUIET_S = 1.0
"""An unchanged pool is sent this often."""


class Viewer:
    """Events that one browser has not been sent yet. A new frame replaces the last."""

    def __init__(self) -> None:
        self._frame: bytes | None = None
        self._compactions: list[Compaction] = []
        self._farewell: bytes | None = None
        self._wake = asyncio.Event()

    def show(self, frame: bytes | None, compactions: list[Compaction]) -> None:
        self._frame = frame or self._frame
        self._compactions = [*self._compactions, *compactions][-MAX_PENDING:]
        self._wake.set()

    def dismiss(self, reason: str) -> None:
        """The feed ends with this word: draining, stopped."""
        self._farewell = event({"reason": reason}, "end")
        self._wake.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Compactions come before the frame that shows their blocks in other hands."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            frame, self._frame = self._frame, None
            done, self._compactions = self._compactions, []
            compactions = event(compactions_json(done), "compactions") if done else b""
            if chunk := compactions + (frame or b""):
                yield chunk
            if self._farewell is not None:
                yield self._farewell
                return
