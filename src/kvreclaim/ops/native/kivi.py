"""kivi4's units in the native layout; what is done with them says ops/reference/kivi.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.extension import native
from kvreclaim.ops.formats.codecs import pack, unpack
from kvreclaim.ops.formats.kivi_codec import OPEN, Units
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.native.views import cache_view
from kvreclaim.ops.reference.kivi import geometry_of, rows_of

PER_WORD = 8


class WordLayout:
    """One plane [L, B, K, unit_bytes]: key words [D / 8][S] of 8 dims of a slot, value words [S / 8][Dv] of
    8 slots of a dim, then the parameters."""

    def load(self, layer: LayerCache, blocks: Tensor) -> Units:
        cache = layer.cache
        parts = layer.planes[0][blocks].split(self._sizes(cache), -1)
        k = parts[0].unflatten(-1, (-1, cache.block_size, PER_WORD // 2)).transpose(-3, -2).flatten(-2)
        words = parts[1].unflatten(-1, (-1, cache.shape.v_dim, PER_WORD // 2))
        v = pack(unpack(words).transpose(-1, -2).flatten(-3, -2))
        return Units(k, v, parts[2])

    def store(self, layer: LayerCache, blocks: Tensor, units: Units) -> None:
        k = units.k.unflatten(-1, (-1, PER_WORD // 2)).transpose(-3, -2)
        slots = unpack(units.v).unflatten(-2, (-1, PER_WORD))  # [.., S / 8, 8, Dv]
        v = pack(slots.transpose(-1, -2))
        layer.planes[0][blocks] = torch.cat((k.flatten(-3), v.flatten(-3), units.params), -1)

    def mark_open(self, layer: LayerCache, blocks: Tensor) -> None:
        codes = sum(self._sizes(layer.cache)[:2])
        layer.planes[0][blocks, :, codes + geometry_of(layer.cache).state] = OPEN

    def _sizes(self, cache: KVCache) -> list[int]:
        """Bytes of key words, value words and parameters."""
        geometry = geometry_of(cache)
        return [cache.block_size * dim // 2 for dim in (geometry.k_dim, geometry.v_dim)] + [geometry.total]


WORDS = WordLayout()


def write_open(layer: LayerCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """formats.kivi.write; k and v with any strides, fp32, bf16 or fp16."""
    cache = layer.cache
    assert cache.origin is None, "tokens are written by block and layer, not by cell"
    native().seal_tokens(cache_view(cache), layer.index, k, v, rows_of(cache).writes(slots))
