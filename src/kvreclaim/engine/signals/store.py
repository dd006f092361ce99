"""A tensor with one row per sequence that asks for what is kept there."""

from __future__ import annotations

import torch
from torch import Tensor


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
