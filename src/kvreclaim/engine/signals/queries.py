"""The last queries of sequences whose policies ask."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.engine.signals.store import Room, RowStore
from kvreclaim.ops.facts import ModelFacts


class QueryStore(RowStore):
    """The last `window` queries of each layer: [rows, L, window, H, D] in the model's dtype.

    The query at position p lies at p % window, so neither chunks nor compactions move anything.
    """

    def __init__(self, window: int, facts: ModelFacts, room: Room) -> None:
        layer = facts.layers[0]
        shape = (facts.num_layers, window, layer.num_heads, layer.head_dim)
        super().__init__(shape, facts.dtype, facts.device, room)
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
        row, first = self.row(seq_id)[layer], start % self.window
        parts = [row[first : first + end - start], row[: max(0, first + end - start - self.window)]]
        return torch.cat(parts).transpose(0, 1)
