"""The bytes of the KV cache. Only ops/ knows how a block lies in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.ops.facts import LayerFacts


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of every layer in blocks whose ids all layers share.

    k: [L, B, K, S, Dk], v: [L, B, K, S, Dv]; keys are stored rotated and never re-rotated.
    """

    k: Tensor
    v: Tensor

    @classmethod
    def allocate(
        cls, layers: tuple[LayerFacts, ...], num_blocks: int, block_size: int, *, like: Tensor
    ) -> KVCache:
        """An all-zero cache with the dtype and device of `like`."""
        first = layers[0]
        shape = (len(layers), num_blocks, first.num_kv_heads, block_size)
        return cls(like.new_zeros((*shape, first.head_dim)), like.new_zeros((*shape, first.v_head_dim)))

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[3]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return (self.k.nbytes + self.v.nbytes) // self.num_blocks


def bytes_per_block(layers: tuple[LayerFacts, ...], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block will take over all layers, before anything is allocated."""
    slot = sum(layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in layers)
    return slot * block_size * dtype.itemsize
