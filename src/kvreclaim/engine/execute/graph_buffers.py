"""Inputs of decode graphs: tensors at fixed addresses, of which each step sends what has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.cell_tables import CellTable, grown_cells, head_lengths
from kvreclaim.ops.cells import natural_cells
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.moving import fill, to_device

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
    """The block tables of all rows [R, W] int32 on the device, with a copy of each row on the host."""

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
        sent = to_device(packed, self.device.device)
        self.device[:, :width].index_copy_(0, sent[:, 0].long(), sent[:, 1:])


class SentCells:
    """The cells of the heads of all rows, of all layers.

    device:  [L, R, K, W] int32
    offsets: [L, R, K] int32, tokens of each head beyond the row's physical length, mostly negative
    """

    def __init__(self, num_rows: int, most: int, cache: KVCache) -> None:
        """most: cells that a head ever has; fewer if they would take more than their share of the cache's
        bytes."""
        rows = cache.num_layers * num_rows * cache.num_kv_heads
        limit = max(LEAST_CELL_BYTES, cache.bytes_per_block * cache.num_blocks // CELL_SHARE) // (4 * rows)
        shape = (cache.num_layers, num_rows, cache.num_kv_heads)
        self.device = torch.zeros((*shape, max(1, min(most, limit))), dtype=torch.int32, device=cache.device)
        self.offsets = torch.zeros(shape, dtype=torch.int32, device=cache.device)
        self.width = self.device.shape[-1]
        self._cache = cache
        self._sent: list[tuple[CellTable | None, np.ndarray]] = [(None, np.zeros(0, np.int32))] * num_rows

    def send(self, cells: Sequence[CellTable | None], rows: Sequence[np.ndarray]) -> None:
        """Send what has changed. cells: of each row, where the last pass has put them; rows: [blocks] int32,
        the block tables, with what was appended since."""
        grown: list[tuple[int, int]] = []
        others: list[int] = []
        for i, (table, ids) in enumerate(zip(cells, rows, strict=True)):
            known, sent = self._sent[i]
            if known is table and sent is ids:
                continue
            if known is table and np.array_equal(ids[: len(sent)], sent):
                grown.append((i, len(sent)))
            else:
                others.append(i)
            self._sent[i] = table, ids
        if grown:
            self._append(grown)
        if others:
            self._replace(others)

    def _append(self, grown: list[tuple[int, int]]) -> None:
        """Send the cells of the last blocks of rows, each from an entry of its table on, in one copy."""
        (num_layers, num_rows, heads), nothing = self.offsets.shape, np.zeros((1, 1), dtype=np.int64)
        held = [self._sent[i] for i, _ in grown]
        firsts = [nothing if table is None else table.counts - table.num_blocks for table, _ in held]
        new = [np.arange(first, len(ids)) for (_, first), (_, ids) in zip(grown, held, strict=True)]
        counts = [len(places) for places in new]
        rows = np.repeat([i for i, _ in grown], counts)
        places = np.concatenate(new)
        blocks = np.concatenate([ids[first:] for (_, first), (_, ids) in zip(grown, held, strict=True)])
        columns = np.repeat(np.stack(np.broadcast_arrays(*firsts), axis=-1), counts, axis=-1) + places
        layers, values = np.arange(num_layers)[:, None, None], natural_cells(self._cache, blocks)
        at = ((layers * num_rows + rows) * heads + np.arange(heads)[:, None]) * self.width + columns
        sent = to_device(np.stack((at.ravel(), values.ravel())), self.device.device)
        self.device.view(-1).index_copy_(0, sent[0], sent[1].int())

    def _replace(self, changed: list[int]) -> None:
        """Send all cells of rows, of all layers, in one copy."""
        found = [grown_cells(*self._sent[i], partial(natural_cells, self._cache)) for i in changed]
        num_layers, _, heads = self.offsets.shape
        width = max(own.shape[-1] for own in found)
        packed = np.zeros((num_layers, len(changed), heads, 2 + width), dtype=np.int32)
        for at, (i, own) in enumerate(zip(changed, found, strict=True)):
            packed[:, at, :, 0], packed[:, at, :, 1] = i, head_lengths(self._sent[i][0], 0, self._cache)
            packed[:, at, :, 2 : 2 + own.shape[-1]] = own
        sent = to_device(packed, self.device.device)
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
