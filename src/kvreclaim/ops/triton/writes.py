"""Storing and copying K/V: write_kv, copy_blocks, gather_tokens. Bytes move as they are."""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor

from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.triton.move_kernels import copy_kernel, gather_kernel, write_kernel
from kvreclaim.ops.triton.support import padded, to_device

COPY_ELEMENTS = 2048
GATHER_TOKENS = 32


def allocate(layers: tuple[LayerFacts, ...], num_blocks: int, block_size: int, *, like: Tensor) -> KVCache:
    """An all-zero row-major cache with the dtype and device of `like`."""
    return KVCache.allocate(layers, num_blocks, block_size, like=like)


def write_kv(cache: KVCache, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """ops.reference.write_kv; a token whose slot is negative (a padding row of a replayed graph) is
    written nowhere."""
    if slot_mapping.shape[0] == 0:
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k.to(cache.dtype), v.to(cache.dtype)))
    write_kernel[(slot_mapping.shape[0], 2)](
        k,
        v,
        cache.k[layer],
        cache.v[layer],
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        KV_HEADS=cache.num_kv_heads,
        S=cache.block_size,
        D=cache.head_dim,
        DV=cache.v_head_dim,
        BLOCK=padded(cache.num_kv_heads * cache.head_dim),
        BLOCK_V=padded(cache.num_kv_heads * cache.v_head_dim),
        num_warps=4,
    )


def copy_blocks(cache: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (source, target) in all layers; no block is both."""
    table = to_device(np.asarray(pairs, dtype=np.int64), cache.device)
    for x in (cache.k, cache.v):
        elements = x[0, 0].numel()
        grid = (len(pairs), cache.num_layers, triton.cdiv(elements, COPY_ELEMENTS))
        copy_kernel[grid](x, table, x.stride(0), elements, COPY_ELEMENTS, num_warps=4)


def prepare_blocks(cache: KVCache, block_ids: list[int]) -> None:
    """Nothing to do: no kernel here loads a slot that is not attended or kept."""


def gather_tokens(tokens: PagedTokens) -> tuple[Tensor, Tensor]:
    """One sequence's keys [K, T, D] and values [K, T, Dv] of one layer in token order (copies)."""
    return (
        _gather(tokens.cache.k[tokens.layer], tokens.block_ids, tokens.num_tokens),
        _gather(tokens.cache.v[tokens.layer], tokens.block_ids, tokens.num_tokens),
    )


def _gather(x: Tensor, block_ids: Tensor, num_tokens: int) -> Tensor:
    """[B, K, S, D] -> [K, T, D]."""
    _, heads, size, dim = x.shape
    out = torch.empty((heads, num_tokens, dim), dtype=x.dtype, device=x.device)
    if num_tokens:
        gather_kernel[(triton.cdiv(num_tokens, GATHER_TOKENS), heads)](
            x,
            out,
            block_ids,
            num_tokens,
            KV_HEADS=heads,
            S=size,
            D=dim,
            BLOCK_N=GATHER_TOKENS,
            BLOCK_D=padded(dim),
            num_warps=4,
        )
    return out
