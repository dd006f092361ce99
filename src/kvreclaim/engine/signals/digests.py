"""Digests of blocks, for policies that read sparsely."""

from __future__ import annotations

import torch

from kvreclaim.engine.signals.store import Room, RowStore
from kvreclaim.ops.facts import ModelFacts


class DigestStore(RowStore):
    """Least and greatest entry of the keys of each full block: [rows, L, 2, K, blocks, D], in the dtype of
    gathered keys: rounded, they would not be bounds. Blocks double when they run out. What it holds follows
    from the cache, so a fork begins anew."""

    def __init__(self, facts: ModelFacts, dtype: torch.dtype, room: Room) -> None:
        layer = facts.layers[0]
        shape = (facts.num_layers, 2, layer.num_kv_heads, 0, layer.head_dim)
        super().__init__(shape, dtype, facts.device, room)
        self._known: dict[int, int] = {}

    def claim(self, seq_id: int, num_blocks: int) -> range:
        """Make room for the sequence's first num_blocks blocks. Returns: those that have no digest yet; the
        caller writes them, layer by layer."""
        self.take(seq_id)
        if num_blocks > self.tensor.shape[-2]:
            self._grow(-2, num_blocks)
        missing = range(self._known.get(seq_id, 0), num_blocks)
        self._known[seq_id] = num_blocks
        return missing

    def drop(self, seq_id: int) -> None:
        super().drop(seq_id)
        self._known.pop(seq_id, None)
