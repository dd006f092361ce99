"""The attention plan of a batch, made once per step: decode rows, query tiles, masks, splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.kv_cache import Memo
from kvreclaim.ops.moving import to_device
from kvreclaim.ops.triton.split_kernels import split_kernel
from kvreclaim.ops.triton.support import num_processors

MAX_SPLITS = 64
MIN_SPLIT = 256
"""Tokens; a shorter share of a sequence is not worth a program of its own."""
PROGRAMS_PER_PROCESSOR = 4
MOST_ROUNDS = 4
"""Programs of whole sequences, as multiples of those that run at once, up to which long sequences are cut."""
ROWS_AT_ONCE = 1024
"""Rows that split_kernel takes at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotPositions:
    """Places of slots, read by the kernels in the sequences' own tensors.

    table:   [N, 4] int64 per sequence: address, length and the strides of layer and head of its slot
             positions; length 0 where it has none
    tensors: what the addresses point into, held alive
    """

    table: Tensor
    tensors: tuple[Tensor, ...]


class Sequences(NamedTuple):
    """A batch as kernels follow it: block_table [N, W] int32, query_starts [N + 1] int32, seq_lens and shifts
    [N] int32; positions: SlotPositions.table, anything where there are none."""

    query_starts: Tensor
    block_table: Tensor
    seq_lens: Tensor
    shifts: Tensor
    positions: Tensor


class SequenceShares(NamedTuple):
    """The tokens of decode rows, cut into shares by the length of each sequence; made on the device.

    units:  [P, 3] int32, one for each program of a head: sequence, share, and number of its shares, 0 where
            there is nothing to do
    firsts: [n + 1] int32, first unit of each row, and their end
    """

    units: Tensor
    firsts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTables(Memo):
    """Sequences with one query each. Kernels read every length and table from these tensors, and the grid
    follows from their shapes and the limits: a CUDA graph can replay it.

    seq_ids:      [n] int32 rows of seqs; a seq_len of 0 gives a zero row
    num_kv_heads: programs of a share; max_seq_len: limit of seq_lens
    """

    seq_ids: Tensor
    seqs: Sequences
    num_kv_heads: int
    max_seq_len: int

    @property
    def shares(self) -> SequenceShares | None:
        """Shares by the lengths at the first use, correct for all later ones; None: sequences stay whole."""
        return self.cached("shares", _shares)


def static_tables(
    block_table: Tensor, seq_lens: Tensor, shifts: Tensor, *, num_kv_heads: int, max_seq_len: int
) -> DecodeTables:
    """Tables of n sequences with one query each. Their values may change between replays.

    Args:
        block_table: [n, W] int32, W blocks enough for max_seq_len tokens; seq_lens, shifts: [n] int32
    """
    rows, device = block_table.shape[0], block_table.device
    order = _order(rows + 1, device)
    seqs = Sequences(order, block_table, seq_lens, shifts, block_table)
    return DecodeTables(order[:rows], seqs, num_kv_heads, max_seq_len)


@cache
def _order(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... int32. Made when a graph is warmed up, so that no capture holds it."""
    return torch.arange(count, dtype=torch.int32, device=device)


def _shares(tables: DecodeTables) -> SequenceShares | None:
    ids, device = tables.seq_ids, tables.seq_ids.device
    shares = num_shares(len(ids), tables.num_kv_heads, tables.max_seq_len, device)
    if shares is None:
        return None
    count = len(ids) + shares
    units, firsts = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in ((count, 3), (len(ids) + 1,))
    )
    limits = {"MIN_SPLIT": MIN_SPLIT, "BLOCK": ROWS_AT_ONCE, "num_warps": 4}
    split_kernel[(1,)](units, firsts, ids, tables.seqs.seq_lens, len(ids), count, shares, **limits)
    return SequenceShares(units, firsts)


def num_shares(num_rows: int, num_kv_heads: int, max_seq_len: int, device: torch.device) -> int | None:
    """Shares of each KV head that fill the device; None where no sequence is worth cutting."""
    shares = PROGRAMS_PER_PROCESSOR * num_processors(device) // num_kv_heads
    if max_seq_len <= MIN_SPLIT or shares < 2 or num_rows > MOST_ROUNDS * shares:
        return None
    return min(shares, num_rows * min(MAX_SPLITS, -(-max_seq_len // MIN_SPLIT)))


def decode_tables(batch: AttentionBatch, num_kv_heads: int) -> DecodeTables | None:
    """Return the sequences of the batch with one query; None if there are none. Made once per step."""

    def make(batch: AttentionBatch) -> DecodeTables | None:
        rows = np.flatnonzero(batch.query_lens == 1).astype(np.int32)
        if not len(rows):
            return None
        ids, longest = to_device(rows, batch.slot_mapping.device), int(batch.lengths[rows].max())
        return DecodeTables(ids, sequences_of(batch), num_kv_heads, longest)

    return batch.cached(f"triton.decode.{num_kv_heads}", make)


def query_tiles(batch: AttentionBatch, size: int) -> Tensor | None:
    """[tiles, 2] int32, sequence and first query of every `size` queries of the sequences with more queries
    than one; None if there are none. Long sequences first, so that no long program starts last."""

    def make(batch: AttentionBatch) -> Tensor | None:
        several = np.flatnonzero(batch.query_lens > 1).tolist()
        tiles = [(i, first) for i in several for first in reversed(range(0, int(batch.query_lens[i]), size))]
        if not tiles:
            return None
        return to_device(np.asarray(tiles, dtype=np.int32), batch.slot_mapping.device)

    return batch.cached(f"triton.tiles.{size}", make)


def tile_splits(batch: AttentionBatch, num_tiles: int, num_heads: int) -> int:
    """Programs over the keys of each tile: enough to fill the device."""
    longest = batch.cached("triton.longest tile", lambda b: int(b.lengths[b.query_lens > 1].max()))
    programs = PROGRAMS_PER_PROCESSOR * num_processors(batch.slot_mapping.device)
    splits = min(programs // (num_tiles * num_heads), MAX_SPLITS, -(-longest // MIN_SPLIT))
    return max(1, splits)


def sequences_of(batch: AttentionBatch) -> Sequences:
    """Made once per step."""

    def make(batch: AttentionBatch) -> Sequences:
        arrays, positions = batch.arrays, slot_positions(batch)
        return Sequences(
            arrays.query_starts,
            arrays.block_table,
            arrays.seq_lens,
            arrays.shifts,
            arrays.block_table if positions is None else positions.table,
        )

    return batch.cached("triton.sequences", make)


def slot_positions(batch: AttentionBatch) -> SlotPositions | None:
    """None if no sequence has any; made once per step."""
    return batch.cached("triton.positions", _slot_positions)


def _slot_positions(batch: AttentionBatch) -> SlotPositions | None:
    if not batch.has_positions:
        return None
    held: list[Tensor] = []

    def entry(x: Tensor | None) -> tuple[int, int, int, int]:
        if x is None:
            return 0, 0, 0, 0
        assert x.dtype == torch.int32, f"slot positions of dtype {x.dtype}, int32 expected"
        x = x if x.stride(-1) == 1 else x.contiguous()
        held.append(x)
        return x.data_ptr(), x.shape[-1], x.stride(0), x.stride(1)

    table = [entry(seq.slot_positions) for seq in batch.sequences]
    return SlotPositions(to_device(np.asarray(table, dtype=np.int64), batch.slot_mapping.device), tuple(held))
