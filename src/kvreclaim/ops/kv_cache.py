"""The bytes of the KV cache. Only ops/ knows how a block lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvreclaim.ops.facts import LayerFacts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of every layer in blocks whose ids all layers share.

    k: [L, B, K, ...], the keys of a block of a head in the layout of the back-end that allocated it
       (row-major [S, Dk] from `allocate`); stored rotated
    v: [L, B, K, S, Dv]
    """

    k: Tensor
    v: Tensor
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def allocate(
        cls, layers: tuple[LayerFacts, ...], num_blocks: int, block_size: int, *, like: Tensor
    ) -> KVCache:
        """An all-zero cache with the dtype and device of `like`."""
        first = layers[0]
        shape = (len(layers), num_blocks, first.num_kv_heads, block_size)
        return cls(like.new_zeros((*shape, first.head_dim)), like.new_zeros((*shape, first.v_head_dim)))

    def cached(self, key: str, make: Callable[[KVCache], T]) -> T:
        """What a back-end derives once for the life of the cache."""
        if key not in self._memo:
            self._memo[key] = make(self)
        return self._memo[key]

    @property
    def num_layers(self) -> int:
        return self.v.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.v.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.v.shape[2]

    @property
    def block_size(self) -> int:
        return self.v.shape[3]

    @property
    def head_dim(self) -> int:
        return self.k[0, 0, 0].numel() // self.block_size

    @property
    def v_head_dim(self) -> int:
        return self.v.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        return self.v.dtype

    @property
    def device(self) -> torch.device:
        return self.v.device

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return (self.k.nbytes + self.v.nbytes) // self.num_blocks


@dataclass(frozen=True, slots=True, eq=False)
class PagedTokens:
    """One sequence's first num_tokens slots of one layer; block_ids: [blocks] int64 on the cache's device."""

    cache: KVCache
    layer: int
    block_ids: Tensor
    num_tokens: int


def bytes_per_block(layers: tuple[LayerFacts, ...], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block will take over all layers, before anything is allocated."""
    slot = sum(layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in layers)
    return slot * block_size * dtype.itemsize
