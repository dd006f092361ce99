"""Tensors with one row per sequence that asks: its last queries, the attention its slots received."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvreclaim.ops.facts import ModelFacts


class RowStore:
    """One tensor [rows, ...]; rows are handed out zeroed, and doubled when they run out.

    Without a row nothing is allocated; when the last one is dropped the memory goes back.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros((0, *shape), dtype=dtype, device=device)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def row(self, seq_id: int) -> Tensor:
        """The row of a sequence that has one: a view, valid until a row is taken."""
        return self.tensor[self._rows[seq_id]]

    def index(self, seq_ids: list[int]) -> Tensor:
        """[len(seq_ids)] int64 rows of sequences that have one."""
        return torch.tensor([self._rows[seq_id] for seq_id in seq_ids], device=self.tensor.device)

    def take(self, seq_id: int) -> None:
        """Give the sequence a row of zeros unless it has one."""
        if seq_id in self._rows:
            return
        if not self._free:
            used = len(self.tensor)
            self._resize(0, max(1, 2 * used))
            self._free = list(range(len(self.tensor) - 1, used - 1, -1))
        self._rows[seq_id] = self._free.pop()
        self.row(seq_id).zero_()

    def copy(self, parent_id: int, child_id: int) -> None:
        """The child's row begins as its parent's, if that has one."""
        if parent_id in self._rows:
            self.take(child_id)
            self.row(child_id).copy_(self.row(parent_id))

    def drop(self, seq_id: int) -> None:
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)
        if not self._rows and self._free:
            self.tensor = self.tensor.new_zeros((0, *self.tensor.shape[1:]))
            self._free = []

    def _resize(self, dim: int, size: int) -> None:
        shape = list(self.tensor.shape)
        shape[dim] = size
        grown = self.tensor.new_zeros(shape)
        grown.narrow(dim, 0, self.tensor.shape[dim]).copy_(self.tensor)
        self.tensor = grown


class QueryStore(RowStore):
    """The last `window` queries of each layer: [rows, L, window, H, D] in the model's dtype.

    The query at position p lies at p % window, so neither chunks nor compactions move anything.
    """

    def __init__(self, window: int, facts: ModelFacts) -> None:
        layer = facts.layers[0]
        shape = (facts.num_layers, window, layer.num_heads, layer.head_dim)
        super().__init__(shape, facts.dtype, facts.device)
        self.window = window
        self._first: dict[int, int] = {}

    def begin(self, seq_id: int, position: int) -> None:
        """A row for a sequence whose queries come from this position on, unless it has one."""
        self.take(seq_id)
        self._first.setdefault(seq_id, position)

    def copy(self, parent_id: int, child_id: int) -> None:
        super().copy(parent_id, child_id)
        if parent_id in self._first:
            self._first[child_id] = self._first[parent_id]

    def drop(self, seq_id: int) -> None:
        super().drop(seq_id)
        self._first.pop(seq_id, None)

    def last(self, seq_id: int, layer: int, end: int) -> Tensor:
        """[H, n, D]: the queries of positions end - n .. end - 1, oldest first; n <= window, fewer where
        they have not been seen."""
        start = max(end - self.window, self._first[seq_id])
        places = torch.arange(start, end, device=self.tensor.device) % self.window
        return self.row(seq_id)[layer, places].transpose(0, 1)


class MassStore(RowStore):
    """The attention that each slot has received: [rows, L, K, slots] fp32; slots double when they run out."""

    def __init__(self, facts: ModelFacts) -> None:
        shape = (facts.num_layers, facts.layers[0].num_kv_heads, 0)
        super().__init__(shape, torch.float32, facts.device)

    def reserve(self, num_slots: int) -> None:
        """Room for so many slots in every row."""
        if num_slots > self.tensor.shape[-1]:
            self._resize(-1, max(num_slots, 2 * self.tensor.shape[-1]))

    def saved(self, seq_ids: list[int]) -> Callable[[], None]:
        """What puts the rows of these sequences back as they are now, while they have them."""
        before = self.tensor[self.index(seq_ids)]

        def restore() -> None:
            self.tensor[self.index(seq_ids), ..., : before.shape[-1]] = before
            self.tensor[self.index(seq_ids), ..., before.shape[-1] :] = 0

        return restore

    def add(self, rows: Tensor, layer: int, sums: Tensor) -> None:
        """Add sums [n, K, C] to slots 0 .. C - 1 of n different rows."""
        self.tensor[:, layer, :, : sums.shape[-1]].index_add_(0, rows, sums)

    def move(self, seq_id: int, kept: Tensor) -> None:
        """Slot kept[l, k, i] goes to slot i, and the others are forgotten; kept [L | 1, K | 1, M] int64."""
        row = self.row(seq_id)
        moved = row.take_along_dim(kept.expand(*row.shape[:2], -1), -1)
        row.zero_()
        row[..., : kept.shape[-1]] = moved
