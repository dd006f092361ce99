"""The same sequence in a native and in a reference cache, every other slot NaN; fp64 bounds for scores."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvreclaim.ops import native, reference
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.kv_cache import KVCache

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 100, 2176)


@dataclass(frozen=True, slots=True)
class Dims:
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 64
    layers: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """num_tokens tokens in blocks block_ids of both caches. keys, values: [L, K, T, ...]."""

    native: KVCache
    reference: KVCache
    block_ids: Tensor
    num_tokens: int
    keys: Tensor
    values: Tensor


def make_pair(dims: Dims, num_tokens: int, *, spare: int = 3, seed: int = 0) -> Pair:
    """Blocks in random order among `spare` foreign ones; what no token fills is NaN."""
    rng = torch.Generator().manual_seed(seed)
    blocks = -(-num_tokens // dims.block_size)
    facts = LayerFacts(dims.kv_heads, dims.kv_heads, dims.dim, dims.v_dim, Softmax(1.0))
    like = torch.zeros(0, dtype=dims.dtype)
    layers = (facts,) * dims.layers
    ours = native.allocate(layers, blocks + spare, dims.block_size, like=like)
    plain = reference.allocate(layers, blocks + spare, dims.block_size, like=like)
    ids = torch.randperm(blocks + spare, generator=rng)[:blocks]
    slots = torch.arange(num_tokens)
    block, offset = ids[slots // dims.block_size], slots % dims.block_size
    for x in (plain.k, plain.v):
        x.fill_(float("nan"))
        noise = torch.randn(dims.layers, num_tokens, dims.kv_heads, x.shape[-1], generator=rng)
        x[:, block, :, offset] = noise.to(dims.dtype).transpose(0, 1)
    ours.k.copy_(to_native(plain.k))
    ours.v.copy_(plain.v)
    keys, values = (x[:, block, :, offset].permute(1, 2, 0, 3) for x in (plain.k, plain.v))
    return Pair(ours, plain, ids, num_tokens, keys, values)


def to_native(k: Tensor) -> Tensor:
    """Keys [..., S, D] in the layout of the native back-end."""
    if k.dtype == torch.float32:
        return k.transpose(-1, -2).contiguous()
    return k.unflatten(-1, (-1, 2)).transpose(-3, -2).contiguous()


def from_native(k: Tensor) -> Tensor:
    """The inverse of to_native."""
    if k.dtype == torch.float32:
        return k.transpose(-1, -2).contiguous()
    return k.transpose(-3, -2).flatten(-2).contiguous()
