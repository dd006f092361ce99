"""The bytes of the KV cache. Only ops/ knows how a block lies in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.formats.format import KVFormat, plain_format

if TYPE_CHECKING:
    from kvreclaim.ops.formats.open_blocks import OpenBlocks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How many blocks of what.

    k_dim:  stored dims of a key: the rotary part alone where latent
    latent: a key is its value followed by the k_dim stored dims (MLA)
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    k_dim: int
    v_dim: int
    latent: bool = False

    @classmethod
    def of(cls, layers: Sequence[LayerFacts], num_blocks: int, block_size: int) -> CacheShape:
        first = layers[0]
        return cls(
            num_layers=len(layers),
            num_blocks=num_blocks,
            num_kv_heads=first.num_kv_heads,
            block_size=block_size,
            k_dim=first.key_dims,
            v_dim=first.v_head_dim,
            latent=first.latent,
        )

    @property
    def head_dim(self) -> int:
        """Dims of a key as queries meet it."""
        return self.v_dim + self.k_dim if self.latent else self.k_dim

    @property
    def units(self) -> tuple[int, int, int]:
        return self.num_layers, self.num_blocks, self.num_kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of every layer in blocks whose ids all layers share.

    planes: each [L, B, K, ...], in the layout of the back-end that allocated it; a plain format has two, the
            keys and the values (row-major [S, D] and [S, Dv] in the reference). Keys are stored rotated.
    open:   blocks that are not full, of a format that has such
    origin: the shape of the cache that this one is a view of (cells.cell_view)
    """

    shape: CacheShape
    format: KVFormat
    planes: tuple[Tensor, ...]
    open: OpenBlocks | None = None
    origin: CacheShape | None = None
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def plain(cls, k: Tensor, v: Tensor, *, latent: bool = False) -> KVCache:
        """Row-major keys [L, B, K, S, D] and values [L, B, K, S, Dv] of one plain dtype, as they are."""
        layers, blocks, heads, size, v_dim = v.shape
        shape = CacheShape(layers, blocks, heads, size, k.shape[-1], v_dim, latent)
        return cls(shape, plain_format(v.dtype), (k, v))

    def cached(self, key: str, make: Callable[[KVCache], T]) -> T:
        """What a back-end derives once for the life of the cache."""
        if key not in self._memo:
            self._memo[key] = make(self)
        return self._memo[key]

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

    @property
    def open_bytes(self) -> int:
        """Bytes of the rows for blocks that are not full, beside the pool."""
        return 0 if self.open is None else self.open.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PagedTokens:
    """One sequence's first num_tokens slots of one layer; block_ids: [blocks] int64 on the cache's device."""

    cache: KVCache
    layer: int
    block_ids: Tensor
    num_tokens: int
