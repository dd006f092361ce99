"""The units of a native cache as the reference's rows, read by the definition in csrc's layout.h."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.formats.codecs import pack, unpack
from kvreclaim.ops.kv_cache import KVCache


def unit_rows(cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of keys [L, B, K, S, D bits / 8], of values [.., Dv bits / 8] and parameters [.., S, P]."""
    shape, form = cache.shape, cache.format
    size = shape.block_size
    parts = [size * form.keys.code_bytes(shape.k_dim), size * form.values.code_bytes(shape.v_dim)]
    units = cache.planes[0]
    parts.append(units.shape[-1] - sum(parts))
    k, v, params = units.split(parts, -1)
    keys = k.unflatten(-1, (-1, size, 4)).transpose(-3, -2).flatten(-2)
    words = v.unflatten(-1, (-1, shape.v_dim, 4))
    is_whole = form.values.bits == 8
    fields = words if is_whole else unpack(words)
    values = fields.transpose(-1, -2).flatten(-3, -2)
    return keys, values if is_whole else pack(values), params.unflatten(-1, (-1, size)).transpose(-1, -2)


def bytes_of(cache: KVCache, blocks: list[int]) -> list[Tensor]:
    """Copies of everything that these blocks hold."""
    index = torch.tensor(blocks, dtype=torch.int64)
    return [plane[:, index].contiguous().view(torch.uint8).clone() for plane in cache.planes]
