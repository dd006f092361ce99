"""The page's feed: one reading of the engine serves every viewer, and nobody waits for a slow one."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import numpy as np

from kvreclaim.engine.serving.readers import Readers
from kvreclaim.errors import EngineDeadError
from kvreclaim.server.errors import ApiError
from kvreclaim.server.events import event
from kvreclaim.server.page import snapshot as reading
from kvreclaim.server.page.cells import count_states, group_size, to_cells
from kvreclaim.server.page.snapshot import Compaction, Snapshot
from kvreclaim.server.service import Service

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
QUIET_S = 1.0
"""An unchanged pool is told this often."""
MAX_VIEWERS = 32
MAX_PENDING = 256
"""Compactions kept for a viewer that does not read; older ones are dropped."""
MAX_HOLDERS = 12
"""Requests that a row of the tree names, by their places in the table."""
MAX_REQUESTS = 200
"""Rows of the table; a request beyond them is still drawn in the pool."""


class Viewer:
    """What one browser has not been sent yet. A new frame replaces the last."""

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

    async def events(self, num_blocks: int) -> AsyncGenerator[bytes, None]:
        """Compactions come before the frame that shows their blocks in other hands."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            frame, self._frame = self._frame, None
            done, self._compactions = self._compactions, []
            told = event(compactions_json(done, num_blocks), "compactions") if done else b""
            if chunk := told + (frame or b""):
                yield chunk
            if self._farewell is not None:
                yield self._farewell
                return


class Feed:
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

    async def _show(self, engine: Readers, draining: asyncio.Event) -> None:
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


def frame_event(snapshot: Snapshot) -> tuple[bytes, bytes]:
    """(what must differ for the frame to be worth sending, the frame as an event)."""
    view = snapshot.view
    cells = to_cells(view.state, view.owner, len(view.requests))
    body: dict[str, Any] = {
        "num_blocks": len(view.state),
        "group": cells.group,
        "cells": b64encode(cells.pack()).decode(),
        "blocks": count_states(view.state),
        "requests": [
            [r.request_id, r.logical_len, r.physical_len, r.num_blocks, r.num_evicted, r.blocks_freed]
            for r in view.requests[:MAX_REQUESTS]
        ],
        "num_owners": len(view.requests),
        "num_spared": snapshot.sharing.num_spared,
        "sharing": [
            [run.level, run.num_blocks, run.num_sequences, run.requests[:MAX_HOLDERS]]
            for run in snapshot.sharing.runs
        ],
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "totals": snapshot.totals,
        "tiers": snapshot.tiers,
    }
    text = event(body)
    return text, event({"at_s": snapshot.at_s, **body}, "frame")


def compactions_json(compactions: list[Compaction], num_blocks: int) -> dict[str, Any]:
    """cells: base64 of uint16 cells in which blocks were given back, each once."""
    cells = np.unique(np.concatenate([each.blocks for each in compactions]) // group_size(num_blocks))
    return {
        "cells": b64encode(cells.astype("<u2").tobytes()).decode(),
        "passes": [
            [each.request_id, each.before, each.after, each.num_freed, each.num_evicted]
            for each in compactions
        ],
    }
