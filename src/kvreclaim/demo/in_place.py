"""Blocks that eviction alone would have freed, without moving tokens."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import torch
from torch import Tensor

from kvreclaim.engine.extension import Extension
from kvreclaim.engine.request.request import Sequence
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.schedule import Pass


def emptied_blocks(survivors: ListLike[Tensor], num_tokens: int, block_size: int) -> int:
    """Count the full blocks of num_tokens tokens in which no head has a survivor.

    survivors: of each head the positions [n] that it still holds
    """
    full = num_tokens // block_size
    used = torch.cat(list(survivors)).div(block_size, rounding_mode="floor").unique()
    return full - int((used < full).sum())


class InPlace(Extension):
    """Follows the survivors of each sequence through its passes. For sequences that do not fork.

    freed: by seq_id, blocks of its text that are empty after its last pass: what a cache that moves nothing
           could have given back
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.freed: dict[int, int] = {}
        self._survivors: dict[int, tuple[int, list[Tensor]]] = {}

    def compressed(self, seq: Sequence, done: Pass[int], kept: Tensor | HeadRows) -> None:
        heads = [slots.cpu() for layer in kept for slots in layer]
        nothing = 0, [torch.empty(0, dtype=torch.int64)] * len(heads)
        start, before = nothing if done.first else self._survivors[seq.seq_id]
        new = torch.arange(start, done.logical_len)
        survivors = [torch.cat([old, new])[slots] for old, slots in zip(before, heads, strict=True)]
        self._survivors[seq.seq_id] = done.logical_len, survivors
        self.freed[seq.seq_id] = emptied_blocks(survivors, done.logical_len, self.block_size)
