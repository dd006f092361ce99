"""The attention that slots have received."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.engine.signals.store import Room, RowStore
from kvreclaim.ops.facts import ModelFacts


class MassStore(RowStore):
    """The attention that each slot has received: [rows, L, K, slots] fp32; slots double when they run out."""

    def __init__(self, facts: ModelFacts, room: Room) -> None:
        shape = (facts.num_layers, facts.layers[0].num_kv_heads, 0)
        super().__init__(shape, torch.float32, facts.device, room)

    def reserve(self, num_slots: int) -> None:
        """Room for so many slots in every row."""
        if num_slots > self.tensor.shape[-1]:
            self._grow(-1, num_slots)

    def add(self, rows: Tensor, layer: int, sums: Tensor) -> None:
        """Add sums [n, K, C] to slots 0 .. C - 1 of n different rows."""
        self.tensor[:, layer, :, : sums.shape[-1]].index_add_(0, rows, sums)

    def move(self, seq_id: int, kept: Tensor) -> None:
        """Slot kept[l, k, i] goes to slot i, and the others are forgotten; kept [L | 1, K | 1, M] int64."""
        row = self.row(seq_id)
        moved = row.take_along_dim(kept.expand(*row.shape[:2], -1), -1)
        row.zero_()
        row[..., : kept.shape[-1]] = moved
