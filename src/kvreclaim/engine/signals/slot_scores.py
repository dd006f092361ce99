"""Scores that are computed with their tokens and stored per slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.reference import compact_layer, gather_slots

DTYPE = torch.float16
"""Scores are logarithms of probabilities. Between -16 and 16 fp16 resolves differences of 1/128."""


def score_bytes(cache: KVCache) -> int:
    """Bytes of the scores of all slots of a cache."""
    return cache.num_layers * cache.num_blocks * cache.num_kv_heads * cache.block_size * DTYPE.itemsize


class ScorePlanes:
    """One fp16 number per slot, layer and KV head, for a cache of any format.

    layers: [B, K, S, 1] of each; cells: the same numbers by cells, [cells, 1, S, 1]
    """

    def __init__(self, layers: Sequence[Tensor], cells: Tensor) -> None:
        self.layers, self.cells = tuple(layers), cells
        self.block_size = cells.shape[2]

    def write(self, layer: int, slots: Tensor, scores: Tensor) -> None:
        """Store scores [T, K] of new tokens in their slots [T], clamped to the range of fp16."""
        most = torch.finfo(DTYPE).max
        rows = scores.clamp(-most, most).to(DTYPE)[..., None]
        self.layers[layer][slots // self.block_size, :, slots % self.block_size] = rows

    def of(self, layer: int, block_ids: Tensor, num_tokens: int) -> Tensor:
        """[K, num_tokens] fp32 of the slots of a sequence's blocks."""
        return gather_slots(self.layers[layer], block_ids, num_tokens)[..., 0].float()

    def of_cells(self, cells: Tensor, num_tokens: int) -> Tensor:
        """[1, num_tokens] fp32 of the slots of one head's cells."""
        return gather_slots(self.cells, cells, num_tokens)[..., 0].float()

    def of_heads(self, cells: HeadRows) -> HeadRows:
        """fp32 of the slots of each head's cells."""
        found = self.of_cells(cells.flat, len(cells.flat) * self.block_size)[0]
        return HeadRows(found, cells.counts * self.block_size)


class SlotScores(ScorePlanes):
    """[L, B, K, S] fp16: one number per slot, layer and KV head of a cache, indexed by blocks and cells.
    Scores are shared, copied and moved with their blocks. Prefix hits and forks therefore find them, and the
    end or preemption of a sequence needs no update."""

    def __init__(self, cache: KVCache) -> None:
        shape = (cache.num_layers, cache.num_blocks, cache.num_kv_heads, cache.block_size, 1)
        self._blocks = torch.zeros(shape, dtype=DTYPE, device=cache.device)
        super().__init__(tuple(self._blocks), self._blocks.view(-1, 1, cache.block_size, 1))

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """[L, B, K, S, 1]: the tensors that move with blocks."""
        return (self._blocks,)

    def of_layers(self, block_ids: Tensor, num_tokens: int) -> Tensor:
        """[L, K, num_tokens] fp32 of the slots of a sequence's blocks."""
        found = self._blocks.index_select(1, block_ids)[..., 0].transpose(1, 2)
        return found.reshape(*found.shape[:2], -1)[..., :num_tokens].float()

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy scores as Backend.copy_blocks copies blocks."""
        source, target = torch.tensor(pairs, device=self._blocks.device).unbind(1)
        self._blocks[:, target] = self._blocks[:, source]

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy the scores of slots source [T] to slots target [T]."""
        size = self.block_size
        found = self._blocks[:, source // size, :, source % size]
        self._blocks[:, target // size, :, target % size] = found

    def compact(self, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        """Compact scores as Backend.compact does."""
        rows = kept.expand(len(self._blocks), -1, -1)
        for plane, row in zip(self.layers, rows, strict=True):
            compact_layer(plane, row, source_ids, target_ids)

    def compact_cells(self, kept: Tensor, source: Tensor, target: Tensor) -> None:
        """Compact scores over the view of cells; kept: [M] slots of the source cells."""
        compact_layer(self.cells, kept[None], source, target)
