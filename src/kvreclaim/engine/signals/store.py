"""A tensor with one row per sequence that asks for what is kept there."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Room:
    """Bytes that all stores may hold together, a store that is being copied into a larger one twice.

    limit: None for no limit
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = 0

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes may be taken on top."""
        return self.limit is None or self.used + num_bytes <= self.limit

    def change(self, old: int, new: int) -> None:
        """So many bytes have taken the place of others. Raises: MemoryError if there is no room for them
        beside the old ones."""
        if new > old and not self.fits(new):
            raise MemoryError(
                f"signals of policies hold {self.used} bytes and need {new} more, but max_signal_bytes is "
                f"{self.limit}; raise it, run fewer sequences, or lower the windows or budgets of policies."
            )
        self.used += new - old


class RowStore:
    """One tensor [rows, ...]; rows are handed out zeroed, and doubled when they run out.

    Without a row nothing is allocated; when the last one is dropped the memory goes back.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, room: Room) -> None:
        self.tensor = torch.zeros((0, *shape), dtype=dtype, device=device)
        self._room = room
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
            self._grow(0, used + 1)
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
            self._room.change(self.tensor.nbytes, 0)
            self.tensor = self.tensor.new_zeros((0, *self.tensor.shape[1:]))
            self._free = []

    def _grow(self, dim: int, size: int) -> None:
        """Make this dim at least so large: doubled if there is room, so that growing stays cheap."""
        shape = list(self.tensor.shape)
        for wanted in (max(size, 2 * self.tensor.shape[dim]), size):
            shape[dim] = wanted
            needed = math.prod(shape) * self.tensor.itemsize
            if self._room.fits(needed):
                break
        self._room.change(self.tensor.nbytes, needed)
        grown = self.tensor.new_zeros(shape)
        grown.narrow(dim, 0, self.tensor.shape[dim]).copy_(self.tensor)
        self.tensor = grown
