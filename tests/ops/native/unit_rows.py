"""The units of a native cache as the reference's rows, read by the definition in csrc's layout.h."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.formats.codecs import pack, unpack
from kvreclaim.ops.kv_cache import KVCache


def unit_rows(cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of keys [L, B, K, S, D bits / 8], of values [.., Dv bits / 8] and parameters [.., S, P]."""
    shape, bits = cache.shape, cache.format.bits
    size = shape.block_size
    parts = [size * dim * bits // 8 for dim in (shape.k_dim, shape.v_dim)]
    units = cache.planes[0]
    parts.append(units.shape[-1] - sum(parts))
    k, v, params = units.split(parts, -1)
    keys = k.unflatten(-1, (-1, size, 4)).transpose(-3, -2).flatten(-2)
    words = v.unflatten(-1, (-1, shape.v_dim, 4))
    fields = words if bits == 8 else unpack(words)
    values = fields.transpose(-1, -2).flatten(-3, -2)
    return keys, values if bits == 8 else pack(values), params.unflatten(-1, (-1, size)).transpose(-1, -2)


def bytes_of(cache: KVCache, blocks: list[int]) -> list[Tensor]:
    """Copies of everything that these blocks hold."""
    index = torch.tensor(blocks, dtype=torch.int64)
    return [plane[:, index].contiguous().view(torch.uint8).clone() for plane in cache.planes]
