"""Events for the page as server-sent events: the pool now, as cells that a browser draws (one per block, or
several blocks per cell in a large pool), and the compactions since."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from kvreclaim.page.sharing import Sharing
from kvreclaim.page.view import CACHED, FREE, IN_USE, PINNED, SHARED, PoolView
from kvreclaim.schedule import Pass

MAX_CELLS = 8192
"""Most cells that half a screen still shows apart."""
MIN_SHOWN = 256
"""Fewest blocks that are drawn, of a pool that has as many."""
NUM_STATES = 5


@dataclass(frozen=True, slots=True, eq=False)
class BlockCells:
    """C cells of `group` blocks each; the last one may have fewer.

    state, owner: [C] uint8, uint16, of most of the blocks that are not free; owner 0: no single request, else
                  1 + its index among the requests
    counts:       [C, states] uint32 blocks in each state; None where a cell is a block
    """

    group: int
    state: NDArray[np.uint8]
    owner: NDArray[np.uint16]
    counts: NDArray[np.uint32] | None

    def pack(self) -> bytes:
        """zlib of owner uint16[C], counts of all states but free uint16[4][C] (if group > 1), state uint8[C],
        little-endian. A group is at most 65,535 blocks."""
        parts = [self.owner.astype("<u2").tobytes()]
        if self.counts is not None:
            parts.append(self.counts[:, FREE + 1 :].T.astype("<u2").tobytes())
        parts.append(self.state.tobytes())
        return zlib.compress(b"".join(parts), 1)


def num_shown(state: NDArray[np.uint8]) -> int:
    """Leading blocks that are drawn: all up to the last one that is not free, rounded up to a power of two.
    state: [B]."""
    last = int(np.flatnonzero(state != FREE)[-1:].sum())
    return min(len(state), max(MIN_SHOWN, 1 << last.bit_length()))


def group_size(num_blocks: int) -> int:
    """Blocks per cell."""
    return -(-num_blocks // MAX_CELLS)


def to_cells(state: NDArray[np.uint8], owner: NDArray[np.int32], num_owners: int) -> BlockCells:
    """Args: state, owner: [B] of PoolView; num_owners: requests that owner may name."""
    group = group_size(len(state))
    if group == 1:
        return BlockCells(1, state, (owner + 1).astype(np.uint16), None)
    num_cells = -(-len(state) // group)
    cell = np.arange(len(state)) // group
    counts = _count(cell, state, num_cells, NUM_STATES)
    kind = np.where((state == IN_USE) & (owner >= 0), NUM_STATES + owner, state)
    per_kind = _count(cell, kind, num_cells, NUM_STATES + num_owners)
    per_kind[:, FREE] = 0
    most = per_kind.argmax(1)  # FREE, the first, where all are 0
    owned = most >= NUM_STATES
    return BlockCells(
        group,
        np.where(owned, IN_USE, most).astype(np.uint8),
        np.where(owned, most - NUM_STATES + 1, 0).astype(np.uint16),
        counts.astype(np.uint32),
    )


def _count(
    cell: NDArray[np.int64], kind: NDArray[np.signedinteger | np.uint8], num_cells: int, num_kinds: int
) -> NDArray[np.int64]:
    """[C, kinds] how many blocks of a cell are of each kind."""
    return np.bincount(cell * num_kinds + kind, minlength=num_cells * num_kinds).reshape(num_cells, num_kinds)


STATE_NAMES = {FREE: "free", CACHED: "cached", PINNED: "pinned", IN_USE: "in_use", SHARED: "shared"}


def count_states(state: NDArray[np.uint8]) -> dict[str, int]:
    """Blocks in each state, by name."""
    counts = np.bincount(state, minlength=NUM_STATES).tolist()
    return {name: counts[code] for code, name in STATE_NAMES.items()}


MAX_HOLDERS = 12
"""Requests that a row of the tree names, by their places in the table."""
SHOWN = attrgetter(
    *("request_id", "logical_len", "physical_len", "num_blocks", "num_evicted", "blocks_freed", "promise")
)
"""Fields of a row of the table."""
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
        "requests": [SHOWN(request) for request in view.requests[:MAX_REQUESTS]],
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
