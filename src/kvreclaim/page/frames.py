"""Events for the page: the pool now, and the compactions since, as server-sent events."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from kvreclaim.page.cells import count_states, num_shown, to_cells
from kvreclaim.page.sharing import Sharing
from kvreclaim.page.view import PoolView
from kvreclaim.schedule import Pass

MAX_HOLDERS = 12
"""Requests that a row of the tree names, by their places in the table."""
MAX_REQUESTS = 200
"""Rows of the table; a request beyond them is still drawn in the pool."""


@dataclass(frozen=True, slots=True, eq=False)
class Compaction:
    """One compression of one sequence.

    blocks:        [n] int32 places in the pool, from 0, of the blocks that left its block table
    before, after: blocks that the sequence held
    num_evicted:   tokens per head
    """

    request_id: str
    blocks: NDArray[np.int32]
    before: int
    after: int
    num_freed: int
    num_evicted: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The engine at one moment; compactions are those since the last snapshot.

    sharing: of running sequences
    totals: counters over the engine's life
    tiers:  below the pool; None where there is nothing
    states: slots of recurrent layers, by what holds them; None: the model has none
    first:  number of the pool's first block
    look_s: what it took to read
    """

    at_s: float
    view: PoolView
    sharing: Sharing
    num_running: int
    num_waiting: int
    totals: dict[str, int]
    tiers: dict[str, Any] | None
    compactions: list[Compaction]
    states: dict[str, int] | None = None
    first: int = 0
    look_s: float = 0.0


def compaction_of(request_id: str, done: Pass[Any], first: int = 0) -> Compaction:
    """Changes of a pass to the blocks of its sequence. first: number of the pool's first block."""
    before, after = np.unique(done.source_ids).astype(np.int32), np.unique(done.target_ids).astype(np.int32)
    return Compaction(
        request_id=request_id,
        blocks=np.setdiff1d(before, after, assume_unique=True) - np.int32(first),
        before=len(before),
        after=len(after),
        num_freed=done.blocks_freed,
        num_evicted=done.num_tokens - done.keep,
    )


def event(data: Any, name: str | None = None) -> bytes:
    """One event; data becomes JSON, a string is sent as it is."""
    text = data.encode() if isinstance(data, str) else to_json(data)
    head = f"event: {name}\n".encode() if name is not None else b""
    return head + b"data: " + text + b"\n\n"


def frame_event(snapshot: Snapshot) -> tuple[bytes, bytes]:
    """(what must differ for the frame to be worth sending, the frame as an event)."""
    view = snapshot.view
    shown = num_shown(view.state)
    cells = to_cells(view.state[:shown], view.owner[:shown], len(view.requests))
    body: dict[str, Any] = {
        "num_blocks": len(view.state),
        "shown": shown,
        "first": snapshot.first,
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
        "states": snapshot.states,
    }
    text = event(body)
    return text, event({"at_s": snapshot.at_s, **body}, "frame")


def compactions_json(compactions: Sequence[Compaction]) -> dict[str, Any]:
    """blocks: base64 of uint32 places in the pool that were given back, each once."""
    blocks = np.unique(np.concatenate([each.blocks for each in compactions]))
    return {
        "blocks": b64encode(blocks.astype("<u4").tobytes()).decode(),
        "passes": [
            [each.request_id, each.before, each.after, each.num_freed, each.num_evicted]
            for each in compactions
        ],
    }
