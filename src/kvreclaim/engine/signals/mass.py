"""The attention that slots have received."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvreclaim.engine.signals.store import RowStore
from kvreclaim.ops.facts import ModelFacts


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
