"""Which cells each head of a compressed sequence holds, wherever they lie.

After a pass a sequence holds budget / S blocks, every cell of which serves some head, full. What is computed
later goes to blocks that are appended, each head in its own cells of them: so all heads' last cells fill up
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CellTable:
    """Where a pass has put the tokens of each head. Never changed, so forks share it.

    table:        [L, K, W] int32 cells, the first `counts` of each row; the rest is padding
    counts:       [L, K] int64, full cells of each head
    num_blocks:   leading entries of the block table that these cells make up
    prompt_slots: [L, K] int64, leading slots of each head that hold prompt tokens
    """

    table: np.ndarray
    counts: np.ndarray
    num_blocks: int
    prompt_slots: np.ndarray


def append_cells(cells: CellTable, appended: np.ndarray) -> np.ndarray:
    """[L, K, W] int32: the cells of each head in token order, padded with cells of the sequence.

    appended: [L, K, blocks] int32, each head's own cells of the blocks that came after the pass
    """
    most = int(cells.counts.max()) + appended.shape[-1]
    found = np.empty((*cells.counts.shape, most), dtype=np.int32)
    found[...] = cells.table[..., :1]
    found[..., : cells.table.shape[-1]] = cells.table
    places = cells.counts[..., None] + np.arange(appended.shape[-1])
    np.put_along_axis(found, places, appended, axis=-1)
    return found


def assign_cells(
    present: np.ndarray, held: np.ndarray, wanted: np.ndarray, every: np.ndarray
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Give every head its number of cells out of those of the target blocks: first the ones that it has
    there, then those that others leave or nobody had.

    Args:
        present: [L, K, W] cells of each head in token order, the first `held` [L, K] of them in use
        wanted:  [L, K] cells of each head afterwards, as many in all as there are
        every:   the cells of the target blocks, in any shape

    Returns: [L, K, max(wanted)] int32 cells, rows padded with their first; and the heads in an order in which
        each may be read and then written: a cell that changes hands is written after its giver was read.
    """
    every = every.ravel()
    assert wanted.sum() == every.size, f"{wanted.sum()} cells wanted, {every.size} there"
    stays = np.isin(present, every) & (np.arange(present.shape[-1]) < held[..., None])
    own = {at: present[at][stays[at]][: wanted[at]] for at in np.ndindex(wanted.shape)}
    spare = np.sort(np.setdiff1d(every, np.concatenate(list(own.values())), assume_unique=True))
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


def join_moves(
    source: Sequence[np.ndarray], kept: Sequence[Tensor], target: Sequence[np.ndarray], block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Several heads' moves as one, over the view in which cells are blocks.

    Args:
        source: cells of each head in token order; target: those that its kept slots fill
        kept:   [n] int64 ascending slots of each

    Returns: slots, source cells, target cells, int64, where `kept` is.
    """
    device = kept[0].device
    sources, targets = (
        torch.from_numpy(np.concatenate(cells).astype(np.int64)).to(device) for cells in (source, target)
    )
    firsts = np.cumsum([0, *(len(cells) * block_size for cells in source)]).tolist()
    slots = torch.cat([head + first for head, first in zip(kept, firsts, strict=False)])
    return slots, sources, targets
