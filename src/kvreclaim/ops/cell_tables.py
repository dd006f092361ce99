"""Tables of the cells that each head of a compressed sequence holds.

After a pass a sequence holds budget / S blocks, every cell of which serves some head, full. What is computed
later goes to blocks that are appended, each head in its own cells of them: so all heads' last cells fill up
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.head_rows import HeadRows, runs, spread
from kvreclaim.ops.moving import to_device


@dataclass(frozen=True, slots=True, eq=False)
class CellTable:
    """Places of each head's tokens after a pass. Immutable, so forks share it.

    table:        [L, K, W] int32 cells, the first `counts` of each row; the rest is padding
    counts:       [L, K] int64, full cells of each head
    num_blocks:   leading entries of the block table that these cells make up
    prompt_slots: [L, K] int64, leading slots of each head that hold prompt tokens
    most:         full cells of the head with the most
    """

    table: np.ndarray
    counts: np.ndarray
    num_blocks: int
    prompt_slots: np.ndarray
    most: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "most", int(self.counts.max()))


class CellShape(Protocol):
    """The sizes of a cache: L, K, S."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


NaturalCells = Callable[[np.ndarray], np.ndarray]
"""Blocks [n] int -> [L, K, n] int32, the cells that every head has in them."""


def head_lengths(cells: CellTable | None, num_slots: int, cache: CellShape) -> np.ndarray:
    """[L, K] int64: tokens of each head when the sequence is num_slots long."""
    if cells is None:
        return np.full((cache.num_layers, cache.num_kv_heads), num_slots)
    return (cells.counts - cells.num_blocks) * cache.block_size + num_slots


def grown_cells(cells: CellTable | None, blocks: np.ndarray, natural: NaturalCells) -> np.ndarray:
    """[L, K, W] int32: the cells of each head in token order, padded with cells of the sequence.

    cells: after the last pass; blocks: [blocks] int, the table with the blocks appended since
    """
    if cells is None:
        return natural(blocks)
    appended = natural(blocks[cells.num_blocks :])
    most = cells.most + appended.shape[-1]
    found = np.empty((*cells.counts.shape, most), dtype=np.int32)
    found[...] = cells.table[..., :1]
    found[..., : cells.table.shape[-1]] = cells.table
    places = cells.counts[..., None] + np.arange(appended.shape[-1])
    np.put_along_axis(found, places, appended, axis=-1)
    return found


def assign_cells(
    present: np.ndarray, held: np.ndarray, num_cells: np.ndarray, every: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Give every head its number of cells out of those of the target blocks: first the ones that it has
    there, then freed and unused ones.

    Args:
        present:   [L, K, W] cells of each head in token order, the first `held` [L, K] of them in use
        num_cells: [L, K] cells of each head afterwards, at least one, as many in all as there are
        every:     the cells of the target blocks, in any shape

    Returns: [L, K, max(num_cells)] int32 cells, rows padded with their first; and the heads, [L * K] int64
        l * K + k, in an order in which each may be read and then written: a cell that changes hands is
        written after its giver was read.
    """
    every = every.ravel()
    assert num_cells.sum() == every.size, f"{num_cells.sum()} cells wanted, {every.size} there"
    stays = np.isin(present, every) & (np.arange(present.shape[-1]) < held[..., None])
    places = stays.cumsum(axis=-1) - 1
    stays &= places < num_cells[..., None]
    own = stays.sum(axis=-1)
    spare = np.setdiff1d(every, present[stays], assume_unique=True)
    spare.sort()
    table = np.empty((*num_cells.shape, int(num_cells.max())), dtype=np.int32)
    columns = np.arange(table.shape[-1])
    table[columns < own[..., None]] = present[stays]
    table[(columns >= own[..., None]) & (columns < num_cells[..., None])] = spare
    table = np.where(columns < num_cells[..., None], table, table[..., :1])
    return table, np.argsort((own < num_cells).ravel(), kind="stable")


@dataclass(frozen=True, slots=True, eq=False)
class CellMoves:
    """A move of each head's kept tokens from old to new cells.

    present: [L, K, W] old cells in token order, the first held [L, K] in use
    kept:    ascending slots of each head
    table:   [L, K, X] new cells, full; order: of the heads (assign_cells)
    """

    present: np.ndarray
    held: np.ndarray
    kept: HeadRows
    table: np.ndarray
    order: np.ndarray

    def parts(self, block_size: int, most: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Moves over the view in which cells are blocks, one after the other: slots, source cells, target
        cells, int64, where `kept` is. Each has whole heads, and begins before it has `most` target cells."""
        held, counts = (x.ravel()[self.order] for x in (self.held, self.kept.counts))
        num_cells, device = counts // block_size, self.kept.flat.device
        heads = (num_cells.cumsum() - num_cells) // max(1, most)
        firsts = np.flatnonzero(np.diff(heads, prepend=-1))
        before = held.cumsum() - held
        base = np.repeat(before[firsts], np.diff(firsts, append=len(held)))
        slots = self.kept.flat.index_select(0, runs(self.kept.starts.ravel()[self.order], counts, device))
        slots += spread((before - base) * block_size, counts, device)
        sources, targets = (
            to_device(_of_rows(cells, self.order, lengths), device)
            for cells, lengths in ((self.present, held), (self.table, num_cells))
        )
        sizes = [np.add.reduceat(x, firsts).tolist() for x in (counts, held, num_cells)]
        return zip(slots.split(sizes[0]), sources.split(sizes[1]), targets.split(sizes[2]), strict=True)


def _of_rows(cells: np.ndarray, order: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the first cells of rows [L, K, W] in this order, so many of each, behind one another: int64."""
    rows = cells.reshape(-1, cells.shape[-1])[order]
    return rows[np.arange(rows.shape[1]) < lengths[:, None]].astype(np.int64)
