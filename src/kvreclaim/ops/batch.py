"""One step's sequences as tensors: queries per sequence, and the blocks of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.kv_cache import Memo
from kvreclaim.ops.moving import to_device


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSlots:
    """One sequence of a step.

    block_ids:      [blocks] int32, contiguous; a hole (its block was returned) names another
    query_len:      tokens computed in this step, the last ones of seq_len
    seq_len:        physical length, this step's tokens included
    shift:          logical minus physical position of the new tokens
    slot_positions: None, or [L, K, slots] int32 logical positions; later slots are at slot + shift
    """

    block_ids: np.ndarray
    query_len: int
    seq_len: int
    shift: int = 0
    slot_positions: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BatchArrays:
    """A batch as tensors on the device, for kernels that follow block tables themselves.

    block_table:  [N, W] int32, rows padded with 0
    query_starts: [N + 1] int32, first row of each sequence in the flat token dim
    seq_lens:     [N] int32 physical lengths; shifts: [N] int32 logical minus physical positions
    """

    block_table: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    shifts: Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, eq=False)
class AttentionBatch(Memo):
    """The sequences of one step in the order of their rows in the flat token dim.

    slot_mapping: [T] int64, block * block_size + offset, where each new token's K/V goes.
    """

    sequences: Sequence[SequenceSlots]
    slot_mapping: Tensor
    block_size: int

    @classmethod
    def build(
        cls, sequences: tuple[SequenceSlots, ...], block_size: int, device: torch.device
    ) -> AttentionBatch:
        if all(seq.query_len == 1 for seq in sequences):
            last = [(seq.block_ids, *divmod(seq.seq_len - 1, block_size)) for seq in sequences]
            mapping = np.array([int(ids[block]) * block_size + offset for ids, block, offset in last])
            return cls(sequences, to_device(mapping, device), block_size)
        parts = [np.zeros(0, dtype=np.int64)]
        for seq in sequences:
            slots = np.arange(seq.seq_len - seq.query_len, seq.seq_len)
            parts.append(seq.block_ids[slots // block_size] * np.int64(block_size) + slots % block_size)
        return cls(sequences, to_device(np.concatenate(parts), device), block_size)

    def part(self, members: list[int]) -> AttentionBatch:
        """A batch of these sequences alone."""
        slots = tuple(self.sequences[i] for i in members)
        return AttentionBatch.build(slots, self.block_size, self.slot_mapping.device)

    def runs(self, most: int) -> Iterator[SequenceSlots]:
        """Split sequences into runs of at most so many rows, over the same blocks."""
        for seq in self.sequences:
            before = seq.seq_len - seq.query_len
            for first in range(0, seq.query_len, most):
                end = min(first + most, seq.query_len)
                yield replace(seq, query_len=end - first, seq_len=before + end)

    def rows_of(self, members: list[int]) -> Tensor:
        """[t] int64: the rows of these sequences."""
        starts = np.cumsum([0, *self.query_lens])
        rows = [np.arange(starts[i], starts[i + 1]) for i in members]
        return to_device(np.concatenate(rows), self.slot_mapping.device)

    @cached_property
    def query_lens(self) -> np.ndarray:
        """[N] int64, on the host."""
        return np.array([seq.query_len for seq in self.sequences], dtype=np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[N] int64 physical lengths, on the host."""
        return np.array([seq.seq_len for seq in self.sequences], dtype=np.int64)

    @cached_property
    def has_positions(self) -> bool:
        """Return whether some sequence has slots at positions of their own."""
        return any(seq.slot_positions is not None for seq in self.sequences)

    @cached_property
    def arrays(self) -> BatchArrays:
        """Built at the first use in a step."""
        rows = self.sequences
        device = self.slot_mapping.device
        table = np.zeros((len(rows), max((len(seq.block_ids) for seq in rows), default=0)), dtype=np.int32)
        for i, seq in enumerate(rows):
            table[i, : len(seq.block_ids)] = seq.block_ids
        starts = np.cumsum([0, *(seq.query_len for seq in rows)], dtype=np.int32)

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return BatchArrays(
            block_table=torch.from_numpy(table).to(device),
            query_starts=torch.from_numpy(starts).to(device),
            seq_lens=ints([seq.seq_len for seq in rows]),
            shifts=ints([seq.shift for seq in rows]),
            max_query_len=max((seq.query_len for seq in rows), default=0),
            max_seq_len=max((seq.seq_len for seq in rows), default=0),
        )

    @cached_property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """Sequences of like shape together, so that one padded product serves each group."""
        members: dict[tuple[int, int], list[int]] = {}
        starts = np.cumsum([0, *(seq.query_len for seq in self.sequences)])
        for i, seq in enumerate(self.sequences):
            if seq.query_len == 0:
                continue
            key = (_bucket(seq.query_len, 1), _bucket(max(seq.seq_len, 256), 2))
            members.setdefault(key, []).append(i)
        return tuple(
            AttentionGroup(
                tuple(self.sequences[i] for i in group),
                tuple(int(starts[i]) for i in group),
                tuple(group),
                self.block_size,
                self.slot_mapping.device,
            )
            for group in members.values()
        )


def _bucket(length: int, log_step: int) -> int:
    return (length - 1).bit_length() // log_step


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """n sequences padded to Q queries and C = blocks * block_size columns; members: which of the batch."""

    sequences: tuple[SequenceSlots, ...]
    starts: tuple[int, ...]
    members: tuple[int, ...]
    block_size: int
    device: torch.device
    _gather: dict[int, Tensor] = field(default_factory=dict)
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @cached_property
    def num_queries(self) -> int:
        return max(seq.query_len for seq in self.sequences)

    @cached_property
    def num_columns(self) -> int:
        most = max(seq.seq_len for seq in self.sequences)
        return blocks_for(most, self.block_size) * self.block_size

    @cached_property
    def rows(self) -> Tensor:
        """[n, Q] int64: flat token of each query; a padded one repeats the sequence's last."""
        q = torch.arange(self.num_queries)
        lens = torch.tensor([seq.query_len for seq in self.sequences])
        rows = torch.tensor(self.starts)[:, None] + torch.minimum(q, lens[:, None] - 1)
        return rows.to(self.device)

    @cached_property
    def places(self) -> Tensor:
        """[n] int64: the members on the device."""
        return torch.tensor(self.members, device=self.device)

    @cached_property
    def is_query(self) -> Tensor:
        """[n, Q] bool: False where `rows` only pads."""
        lens = torch.tensor([seq.query_len for seq in self.sequences])
        return (torch.arange(self.num_queries) < lens[:, None]).to(self.device)

    def gather_index(self, num_kv_heads: int) -> Tensor:
        """[n * K * blocks] int64 into the cache seen as [B * K, S * D]."""
        index = self._gather.get(num_kv_heads)
        if index is None:
            width = self.num_columns // self.block_size
            table = np.stack([_padded(seq.block_ids, width) for seq in self.sequences])
            heads = np.arange(num_kv_heads)
            flat = table[:, None, :].astype(np.int64) * num_kv_heads + heads[None, :, None]
            index = self._gather[num_kv_heads] = torch.from_numpy(flat.reshape(-1)).to(self.device)
        return index

    def mask(self, layer: int, window: int | None) -> Tensor:
        """[n, 1 | K, Q, C] bool, True where attended; cached when it is the same for every layer."""
        per_layer = window is not None and any(seq.slot_positions is not None for seq in self.sequences)
        key = (layer if per_layer else -1, window)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._causal()
            if window is not None:
                mask = mask & (self._query_positions[:, None, :, None] - self._positions(layer) < window)
            self._masks[key] = mask
        return mask

    @cached_property
    def _query_slots(self) -> Tensor:
        """[n, Q] int64 physical slot of each query."""
        first = torch.tensor([seq.seq_len - seq.query_len for seq in self.sequences])
        last = torch.tensor([seq.seq_len - 1 for seq in self.sequences])
        slots = torch.minimum(first[:, None] + torch.arange(self.num_queries), last[:, None])
        return slots.to(self.device)

    @cached_property
    def _query_positions(self) -> Tensor:
        shift = torch.tensor([seq.shift for seq in self.sequences], device=self.device)
        return self._query_slots + shift[:, None]

    def _causal(self) -> Tensor:
        columns = torch.arange(self.num_columns, device=self.device)
        return (columns <= self._query_slots[:, :, None])[:, None]

    def _positions(self, layer: int) -> Tensor:
        """[n, 1 | K, 1, C] logical position of each slot."""
        columns = torch.arange(self.num_columns, device=self.device)
        shift = torch.tensor([seq.shift for seq in self.sequences], device=self.device)
        positions = (columns + shift[:, None])[:, None, None]
        known = [seq.slot_positions for seq in self.sequences]
        heads = next((p.shape[1] for p in known if p is not None), None)
        if heads is None:
            return positions
        positions = positions.expand(-1, heads, -1, -1).clone()
        for i, table in enumerate(known):
            if table is not None:
                positions[i, :, 0, : table.shape[-1]] = table[layer]
        return positions


def _padded(block_ids: np.ndarray, width: int) -> np.ndarray:
    """Pad with the last block: a masked column then reads the sequence's own, finite bytes."""
    row = block_ids[:width]
    return np.pad(row, (0, width - len(row)), mode="edge") if len(row) < width else row
