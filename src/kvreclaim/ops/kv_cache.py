"""The bytes of the KV cache. Only ops/ knows how a block lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from kvreclaim.ops.facts import CacheShape, Softmax, joined_softmax
from kvreclaim.ops.formats.format import KVFormat, plain_format

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Memo:
    """Keeps what back-ends derive of an object once for its life."""

    _memo: dict[str, Any] = field(init=False, default_factory=dict, repr=False)

    def cached(self, key: str, make: Callable[[Self], T]) -> T:
        """Return the value that `make` derives from it, made at the first call."""
        if key not in self._memo:
            self._memo[key] = make(self)
        return self._memo[key]


@dataclass(frozen=True, slots=True, eq=False)
class KVCache(Memo):
    """Keys and values of every layer in blocks; all layers share the block ids.

    planes: each [L, B, K, ...], in the layout of the back-end that allocated it; a plain format has two, the
            keys and the values (row-major [S, D] and [S, Dv] in the reference). Keys are stored rotated.
    softmaxes: of each layer
    """

    shape: CacheShape
    format: KVFormat
    planes: tuple[Tensor, ...]
    softmaxes: tuple[Softmax, ...]
    layers: tuple[LayerCache, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layers = tuple(
            LayerCache(self, index, tuple(plane[index] for plane in self.planes), softmax)
            for index, softmax in enumerate(self.softmaxes)
        )
        object.__setattr__(self, "layers", layers)

    @classmethod
    def plain(cls, k: Tensor, v: Tensor, softmaxes: tuple[Softmax, ...], *, latent: bool = False) -> KVCache:
        """Row-major keys [L, B, K, S, D] and values [L, B, K, S, Dv] of one plain dtype, as they are."""
        layers, blocks, heads, size, v_dim = v.shape
        shape = CacheShape(layers, blocks, heads, size, k.shape[-1], v_dim, latent)
        return cls(shape, plain_format(v.dtype), (k, v), softmaxes)

    def stacked(self, layers: tuple[int, ...]) -> LayerCache:
        """Return a cached view of these layers as one, whose block l * B + b is block b of layer l."""

        def every(cache: KVCache) -> KVCache:
            shape = replace(cache.shape, num_layers=1, num_blocks=cache.num_layers * cache.num_blocks)
            planes = tuple(plane.view(1, shape.num_blocks, *plane.shape[2:]) for plane in cache.planes)
            return KVCache(shape, cache.format, planes, cache.softmaxes[:1])

        def make(cache: KVCache) -> LayerCache:
            joined = joined_softmax([cache.softmaxes[layer] for layer in layers])
            return replace(cache.cached("stacked", every).layers[0], softmax=joined)

        return self.cached(f"stacked {layers}", make)

    @property
    def k(self) -> Tensor:
        assert self.format.is_plain, "a coded format has no plane of keys in numbers"
        return self.planes[0]

    @property
    def v(self) -> Tensor:
        assert self.format.is_plain, "a coded format has no plane of values in numbers"
        return self.planes[1]

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def num_blocks(self) -> int:
        return self.shape.num_blocks

    @property
    def num_kv_heads(self) -> int:
        return self.shape.num_kv_heads

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.shape.v_dim

    @property
    def number(self) -> torch.dtype:
        """dtype of what gather_tokens gives."""
        return self.format.number

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers: keys, values and their parameters. Counted, not derived."""
        return sum(plane.nbytes for plane in self.planes) // self.num_blocks


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache(Memo):
    """One layer of a cache: what every op takes that reads or writes tokens.

    index:  its place in the cache's planes
    planes: its own, each [B, K, ...]
    """

    cache: KVCache
    index: int
    planes: tuple[Tensor, ...]
    softmax: Softmax


@dataclass(frozen=True, slots=True, eq=False)
class PagedTokens:
    """One sequence's first num_tokens slots of one layer, or of several as one (KVCache.stacked).

    block_ids: [blocks] int64 on the cache's device; of n stacked layers [n, blocks]
    heads:     of cells (ops/cells.py) of transformed keys: [blocks] int64, the KV head that each belongs to,
               in any place; a row of the layer's KeyTransform
    """

    layer: LayerCache
    block_ids: Tensor
    num_tokens: int
    heads: Tensor | None = None

    @classmethod
    def of_layers(cls, cache: KVCache, layers: tuple[int, ...], block_ids: Tensor, num_tokens: int) -> Self:
        """Return the slots of blocks [blocks] int64 in these layers: num_heads is n * K."""
        if len(layers) == 1:
            return cls(cache.layers[layers[0]], block_ids, num_tokens)
        first = cache.cached(
            f"first blocks {layers}",
            lambda own: torch.tensor(layers, device=own.device)[:, None] * own.num_blocks,
        )
        return cls(cache.stacked(layers), first + block_ids, num_tokens)

    @property
    def is_stacked(self) -> bool:
        return self.block_ids.ndim == 2

    @property
    def num_heads(self) -> int:
        """KV heads of all its layers."""
        return self.block_ids.shape[:-1].numel() * self.cache.num_kv_heads

    @property
    def cache(self) -> KVCache:
        return self.layer.cache
