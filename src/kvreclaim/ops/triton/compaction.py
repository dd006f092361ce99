"""compact: every layer's survivors slide together, in place where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.triton.move_kernels import compact_kernel
from kvreclaim.ops.triton.support import num_processors, padded

TILE_BYTES = 32768


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """ops.reference.compact: one launch for the keys of all layers, one for the values.

    Does not wait for the device: whether targets overlap later sources is found and used there.
    """
    num_slots = target_ids.shape[0] * cache.block_size
    if num_slots == 0:
        return
    kept = kept.expand(cache.num_layers, cache.num_kv_heads, -1)
    kept = kept if kept.stride(-1) == 1 else kept.contiguous()
    overlaps = _overlaps(source_ids, target_ids)
    items = cache.num_layers * cache.num_kv_heads
    programs = min(items, num_processors(cache.device))
    dims = max(cache.head_dim, cache.v_head_dim)
    room = torch.empty((programs, num_slots, dims), dtype=cache.dtype, device=cache.device)
    for x in (cache.k, cache.v):
        block_d = padded(x.shape[-1])
        compact_kernel[(programs,)](
            x,
            room,
            kept,
            source_ids,
            target_ids,
            overlaps,
            items,
            kept.shape[-1],
            num_slots,
            x.stride(0),
            kept.stride(0),
            kept.stride(1),
            KV_HEADS=cache.num_kv_heads,
            S=cache.block_size,
            D=x.shape[-1],
            BLOCK_N=max(16, TILE_BYTES // (block_d * cache.dtype.itemsize)),
            BLOCK_D=block_d,
            num_warps=8,
        )


def _overlaps(source_ids: Tensor, target_ids: Tensor) -> Tensor:
    """int32 [], not 0 if a target block stands later in the old table than in the new one."""
    old, new = (torch.arange(ids.shape[0], device=ids.device) for ids in (source_ids, target_ids))
    is_later = old[None, :] > new[:, None]
    return ((target_ids[:, None] == source_ids[None, :]) & is_later).any().to(torch.int32)
