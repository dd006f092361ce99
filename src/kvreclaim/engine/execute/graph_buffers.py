"""Inputs of decode graphs: tensors at fixed addresses, of which each step sends what has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.cell_tables import HeadCells
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.moving import fill, move

TOKEN, POSITION, FIRST_TABLE = range(3)
SLOT, LENGTH, SHIFT, PER_TABLE = range(4)
NO_SLOT = -1

LEAST_CELL_BYTES, CELL_SHARE = 1 << 24, 64
"""The cells of all rows take at most so many bytes, or this share of the KV cache, whichever is more."""


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """The rows of a step as the layers with one table see them.

    block_ids: of each row [blocks] int32: another array whenever they change
    lengths:   [N] int64, physical, the row's own token included
    shifts:    [N] int64, logical minus physical positions
    """

    block_ids: Sequence[np.ndarray]
    lengths: np.ndarray
    shifts: np.ndarray


class SentTable:
    """The block tables of all rows [R, W] int32 on the device, and on the host what each row holds."""

    def __init__(self, num_rows: int, width: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self.width = width
        self._sent: list[np.ndarray] = [np.zeros(0, dtype=np.int32)] * num_rows

    def send(self, rows: Sequence[np.ndarray]) -> None:
        """Send the rows with changed blocks, each [W] int32, in one copy."""
        others = [i for i, ids in enumerate(rows) if ids is not self._sent[i]]
        changed = [i for i in others if not np.array_equal(rows[i], self._sent[i])]
        for i in others:
            self._sent[i] = rows[i]
        if not changed:
            return
        width = max(len(rows[i]) for i in changed)
        packed = np.zeros((len(changed), 1 + width), dtype=np.int32)
        for entry, i in zip(packed, changed, strict=True):
            entry[0], entry[1 : 1 + len(rows[i])] = i, rows[i]
        sent = move(packed, self.device.device)
        self.device[:, :width].index_copy_(0, sent[:, 0].long(), sent[:, 1:])


class SentCells:
    """The cells of the heads of all rows, of all layers.

    device:  [L, R, K, W] int32
    offsets: [L, R, K] int32; HeadCells.offsets
    """

    def __init__(self, num_rows: int, most: int, cache: KVCache) -> None:
        """most: cells that a head ever has; fewer if they would take more than their share of the cache's
        bytes."""
        rows = cache.num_layers * num_rows * cache.num_kv_heads
        limit = max(LEAST_CELL_BYTES, cache.bytes_per_block * cache.num_blocks // CELL_SHARE) // (4 * rows)
        shape = (cache.num_layers, num_rows, cache.num_kv_heads)
        self.device = torch.zeros((*shape, max(1, min(most, limit))), dtype=torch.int32, device=cache.device)
        self.offsets = torch.zeros(shape, dtype=torch.int32, device=cache.device)
        self._sent: list[HeadCells | None] = [None] * num_rows

    @property
    def width(self) -> int:
        return self.device.shape[-1]

    def send(self, rows: Sequence[HeadCells]) -> None:
        """Send the rows with changed cells, all layers in one copy."""
        changed = [i for i, row in enumerate(rows) if row is not self._sent[i]]
        if not changed:
            return
        width = max(rows[i].cells.shape[-1] for i in changed)
        num_layers, _, heads = self.offsets.shape
        packed = np.zeros((num_layers, len(changed), heads, 2 + width), dtype=np.int32)
        for at, i in enumerate(changed):
            own = rows[i]
            packed[:, at, :, 0], packed[:, at, :, 1] = i, own.offsets
            packed[:, at, :, 2 : 2 + own.cells.shape[-1]] = own.cells
            self._sent[i] = own
        sent = move(packed, self.device.device)
        places = sent[0, :, 0, 0].long()
        self.offsets.index_copy_(1, places, sent[..., 1])
        self.device[..., :width].index_copy_(1, places, sent[..., 2:])


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """Rows beyond the step's are empty sequences that are written nowhere.

    numbers: [R, 2 + 3 * tables] int64: token and position of each row, then for each of its tables the slot
             of its token, physical length and shift
    tables:  of the layers with full attention, and of each group of windows
    """

    numbers: Tensor
    tables: tuple[SentTable, ...]

    @classmethod
    def allocate(cls, num_rows: int, tables: Sequence[tuple[int, int]], device: torch.device) -> StepBuffers:
        """tables: width and block size of each"""
        numbers = torch.zeros((num_rows, FIRST_TABLE + PER_TABLE * len(tables)), dtype=torch.int64)
        numbers[:, FIRST_TABLE + SLOT :: PER_TABLE] = NO_SLOT
        made = tuple(SentTable(num_rows, width, size, device) for width, size in tables)
        return cls(numbers.to(device), made)

    def fill(
        self,
        num_rows: int,
        tokens: Sequence[int],
        positions: np.ndarray,
        rows: Sequence[TableRows],
    ) -> None:
        """A step's values in the first rows, empty sequences up to num_rows. rows: of each table"""
        used = len(tokens)
        numbers = np.zeros((num_rows, self.numbers.shape[1]), dtype=np.int64)
        numbers[:used, TOKEN], numbers[:used, POSITION] = tokens, positions
        numbers[:, FIRST_TABLE + SLOT :: PER_TABLE] = NO_SLOT
        for n, (table, own) in enumerate(zip(self.tables, rows, strict=True)):
            last, offsets = np.divmod(own.lengths - 1, table.block_size)
            blocks = [ids[i] for ids, i in zip(own.block_ids, last.tolist(), strict=True)]
            slots = np.array(blocks, dtype=np.int64) * table.block_size + offsets
            first = FIRST_TABLE + PER_TABLE * n
            numbers[:used, first : first + PER_TABLE] = np.stack((slots, own.lengths, own.shifts), axis=1)
            table.send(own.block_ids)
        fill(self.numbers[:num_rows], numbers)

    def of_table(self, n: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots [num_rows] int64, blocks [num_rows, W], lengths and shifts [num_rows] int32 of a table."""
        first = FIRST_TABLE + PER_TABLE * n
        slots, lengths, shifts = self.numbers[:num_rows, first : first + PER_TABLE].unbind(1)
        return slots.contiguous(), self.tables[n].device[:num_rows], lengths.int(), shifts.int()
