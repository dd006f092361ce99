"""Storing, copying and moving K/V: write_kv, copy_blocks, gather_tokens, compact."""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor

from kvreclaim.ops import reference
from kvreclaim.ops.kv_cache import KVCache, LayerCache, PagedTokens
from kvreclaim.ops.moving import to_device
from kvreclaim.ops.triton.encode import encode_kernel
from kvreclaim.ops.triton.layout import layout_of, rows_in, store_of
from kvreclaim.ops.triton.move_kernels import compact_kernel, copy_kernel, gather_kernel, write_kernel
from kvreclaim.ops.triton.support import num_processors, padded

COPY_ELEMENTS = 2048
GATHER_TOKENS = 32
ENCODED_NUMBERS = 4096
"""Numbers of one side that a program encodes, at most; fewer where there are processors for more programs."""
TILE_BYTES = 16384
MAX_TILE_SLOTS = 256
ROOM_BYTES = 1 << 26
"""The buffer of compact takes at most so many, or those of one layer."""


def write_kv(layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """ops.reference.write_kv; a token with a negative slot (a padding row of a replayed graph) is
    written nowhere."""
    if slot_mapping.shape[0] == 0:
        return
    cache = layer.cache
    if cache.shape.latent:
        k = k[..., cache.v_head_dim :]
    if cache.format.is_plain:
        k, v = k.to(cache.number), v.to(cache.number)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    if cache.format.is_plain:
        _write_numbers(layer, k, v, slot_mapping)
    else:
        _write_codes(layer, k, v, slot_mapping)


def _write_numbers(layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    layout = layout_of(layer.cache)
    write_kernel[(slot_mapping.shape[0], 2)](
        rows_in(k),
        rows_in(v),
        store_of(layer),
        slot_mapping,
        L=layout,
        BLOCK=padded(layout.KV_HEADS * layout.D),
        BLOCK_V=padded(layout.KV_HEADS * layout.DV),
        num_warps=4,
    )


def _write_codes(layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    layout, count = layout_of(layer.cache), k.shape[0] * k.shape[1]
    most = max(1, ENCODED_NUMBERS // max(layout.BLOCK_D, layout.BLOCK_DV))
    share = triton.cdiv(count, num_processors(layer.cache.device))
    rows = min(most, 1 << (share - 1).bit_length())
    encode_kernel[(triton.cdiv(count, rows),)](
        rows_in(k),
        rows_in(v),
        store_of(layer),
        slot_mapping,
        k.shape[0],
        L=layout,
        ROWS=rows,
        num_warps=4,
    )


def copy_blocks(cache: KVCache, pairs: list[tuple[int, int]]) -> None:
    """ops.reference.copy_blocks. The kernel's programs copy in any order, so a block that is source and
    target of one call goes through a copy of all sources."""
    if not {source for source, _ in pairs}.isdisjoint(target for _, target in pairs):
        return reference.copy_blocks(cache, pairs)
    table = to_device(np.asarray(pairs, dtype=np.int64), cache.device)
    for plane in cache.planes:
        elements = plane[0, 0].numel()
        grid = (len(pairs), cache.num_layers, triton.cdiv(elements, COPY_ELEMENTS))
        copy_kernel[grid](plane, table, plane.stride(0), elements, COPY_ELEMENTS, num_warps=4)


def prepare_blocks(cache: KVCache, block_ids: list[int]) -> None:
    """Nothing to do: no kernel here loads a slot that is not attended or kept."""


def gather_tokens(tokens: PagedTokens) -> tuple[Tensor, Tensor]:
    """One sequence's keys [K, T, D] and values [K, T, Dv] of one layer in token order (copies): of a plain
    format in its dtype, of codes in fp32. Latent values are a part of their keys."""
    cache = tokens.cache
    keys = _new(tokens, cache.head_dim)
    if not cache.shape.latent:
        values = _new(tokens, cache.v_head_dim)
        _gather(tokens, keys, 0)
        _gather(tokens, values, 1)
        return keys, values
    values, rotary = keys[..., : cache.v_head_dim], keys[..., cache.v_head_dim :]
    _gather(tokens, values, 1)
    _gather(tokens, rotary, 0)
    return keys, values


def _new(tokens: PagedTokens, dim: int) -> Tensor:
    cache = tokens.cache
    shape = (tokens.num_heads, tokens.num_tokens, dim)
    return torch.empty(shape, dtype=cache.number, device=cache.device)


def _gather(tokens: PagedTokens, out: Tensor, side: int) -> None:
    """out: [K, T, dims] of this side, a part of the columns of a contiguous tensor."""
    cache = tokens.cache
    if tokens.num_tokens:
        gather_kernel[(triton.cdiv(tokens.num_tokens, GATHER_TOKENS), tokens.num_heads)](
            store_of(tokens.layer),
            out,
            tokens.block_ids,
            tokens.block_ids.shape[-1],
            tokens.num_tokens,
            out.stride(1),
            L=layout_of(cache),
            STACKED=tokens.is_stacked,
            SIDE=side,
            BLOCK_N=GATHER_TOKENS,
            num_warps=4,
        )


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """ops.reference.compact: two launches for each plane of some layers; codes and their parameters move as
    they are. Does not wait for the device."""
    heads, num_slots = cache.num_kv_heads, target_ids.shape[0] * cache.block_size
    if num_slots == 0:
        return
    kept = kept.expand(cache.num_layers, heads, -1)
    kept = kept if kept.stride(-1) == 1 else kept.contiguous()
    row_bytes = max(plane[0, 0, 0, 0].nbytes for plane in cache.planes)
    step = min(cache.num_layers, max(1, ROOM_BYTES // (heads * num_slots * row_bytes)))
    room = torch.empty((step * heads, num_slots, row_bytes), dtype=torch.uint8, device=cache.device)
    for first in range(0, cache.num_layers, step):
        own = kept[first : first + step]
        for plane in cache.planes:
            dim, block_d = plane.shape[-1], padded(plane.shape[-1])
            tokens = min(MAX_TILE_SLOTS, max(16, TILE_BYTES // (block_d * plane.itemsize)))
            for is_read in (True, False):
                compact_kernel[(len(own) * heads, triton.cdiv(num_slots, tokens))](
                    plane[first:],
                    room.view(plane.dtype),
                    own,
                    source_ids,
                    target_ids,
                    kept.shape[-1],
                    num_slots,
                    plane.stride(0),
                    own.stride(0),
                    own.stride(1),
                    IS_READ=is_read,
                    KV_HEADS=heads,
                    S=cache.block_size,
                    D=dim,
                    BLOCK_N=tokens,
                    BLOCK_D=block_d,
                    num_warps=4,
                )
