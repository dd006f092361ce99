"""Which cells serve which head of a sequence whose heads keep unequal numbers of tokens.

After a pass the sequence holds budget / S blocks, every cell of which serves some head, full. What is
computed later goes to blocks that are appended, each head in its own cells of them. So all heads' last cells
fill up together, and block table, physical length and slot mapping are those of any other sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.ops.cells import blocks_of, natural_cells
from kvreclaim.ops.kv_cache import KVCache

if TYPE_CHECKING:
    from kvreclaim.engine.core.request import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Where a pass has put the tokens of each head. Never changed, so forks share it.

    table:        [L, K, W] int32 cells (ops.cells), the first `counts` of each row; the rest is padding
    counts:       [L, K] int64, full cells of each head
    num_blocks:   leading entries of the block table that these cells make up
    prompt_slots: [L, K] int64, leading slots of each head that hold prompt tokens
    """

    table: np.ndarray
    counts: np.ndarray
    num_blocks: int
    prompt_slots: np.ndarray


def head_cells(seq: Sequence, table: BlockTable, cache: KVCache) -> np.ndarray:
    """[L, K, W] int32: the cells of each head in token order, padded with cells of the sequence."""
    if seq.cell_cache is None or seq.cell_cache[0] != table.version:
        seq.cell_cache = (table.version, _head_cells(seq.state.cells, table, cache))
    return seq.cell_cache[1]


def _head_cells(cells: Cells | None, table: BlockTable, cache: KVCache) -> np.ndarray:
    blocks = np.array(table.blocks(), dtype=np.int64)
    if cells is None:
        return natural_cells(cache, blocks)
    grown = natural_cells(cache, blocks[cells.num_blocks :])
    most = int(cells.counts.max()) + grown.shape[-1]
    found = np.empty((*cells.counts.shape, most), dtype=np.int32)
    found[...] = cells.table[..., :1]
    found[..., : cells.table.shape[-1]] = cells.table
    places = cells.counts[..., None] + np.arange(grown.shape[-1])
    np.put_along_axis(found, places, grown, axis=-1)
    return found


def head_lengths(seq: Sequence, physical_len: int, cache: KVCache) -> np.ndarray:
    """[L, K] int64: tokens of each head when the sequence is physical_len long."""
    cells = seq.state.cells
    if cells is None:
        return np.full((cache.num_layers, cache.num_kv_heads), physical_len)
    return (cells.counts - cells.num_blocks) * cache.block_size + physical_len


def assign_cells(
    present: np.ndarray, held: np.ndarray, wanted: np.ndarray, targets: np.ndarray, cache: KVCache
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Give every head its number of cells out of the target blocks: first the ones that it has there, then
    those that others leave or nobody had.

    Args:
        present: [L, K, W] cells of each head in token order, the first `held` [L, K] of them in use
        wanted:  [L, K] cells of each head afterwards, as many in all as the targets have
        targets: [blocks] block ids

    Returns: [L, K, max(wanted)] int32 cells, rows padded with their first; and the heads in an order in which
        each may be read and then written: a cell that changes hands is written after its giver was read.
    """
    every = natural_cells(cache, targets).ravel()
    assert wanted.sum() == every.size, f"{wanted.sum()} cells wanted, {every.size} there"
    is_target = np.zeros(cache.num_blocks, dtype=bool)
    is_target[targets] = True
    own: dict[tuple[int, int], np.ndarray] = {}
    for at in np.ndindex(wanted.shape):
        cells = present[at][: held[at]]
        own[at] = cells[is_target[blocks_of(cache, cells)]][: wanted[at]]
    spare = np.setdiff1d(every, np.concatenate(list(own.values())))
    givers = [at for at in own if len(own[at]) == wanted[at]]
    takers = [at for at in own if len(own[at]) < wanted[at]]
    table = np.empty((*wanted.shape, int(wanted.max())), dtype=np.int32)
    used = 0
    for at in (*givers, *takers):
        missing = int(wanted[at]) - len(own[at])
        row = np.concatenate([own[at], spare[used : used + missing]])
        used += missing
        table[at] = row[0]
        table[at][: len(row)] = row
    return table, [*givers, *takers]
