"""The block pool as cells that a browser draws: one per block, or several blocks per cell in a large pool."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreclaim.page.view import CACHED, FREE, IN_USE, PINNED, SHARED

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
