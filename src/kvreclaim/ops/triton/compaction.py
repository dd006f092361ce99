"""compact: every layer's survivors slide together, in place where that is safe."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.triton.move_kernels import compact_kernel
from kvreclaim.ops.triton.support import num_processors, padded

TILE_BYTES = 32768
MAX_TILE_SLOTS = 1024


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """ops.reference.compact: one launch for all layers of each plane; codes and their parameters move as they
    are.

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
    row_bytes = max(plane[0, 0, 0, 0].nbytes for plane in cache.planes)
    room = torch.empty((programs, num_slots, row_bytes), dtype=torch.uint8, device=cache.device)
    for plane in cache.planes:
        dim = plane.shape[-1]
        block_d = padded(dim)
        compact_kernel[(programs,)](
            plane,
            room.view(plane.dtype),
            kept,
            source_ids,
            target_ids,
            overlaps,
            items,
            kept.shape[-1],
            num_slots,
            plane.stride(0),
            kept.stride(0),
            kept.stride(1),
            KV_HEADS=cache.num_kv_heads,
            S=cache.block_size,
            D=dim,
            BLOCK_N=min(MAX_TILE_SLOTS, max(16, TILE_BYTES // (block_d * plane.itemsize))),
            BLOCK_D=block_d,
            num_warps=8,
        )


def _overlaps(source_ids: Tensor, target_ids: Tensor) -> Tensor:
    """int32 [], not 0 if a target block stands later in the old table than in the new one."""
    old, new = (torch.arange(ids.shape[0], device=ids.device) for ids in (source_ids, target_ids))
    is_later = old[None, :] > new[:, None]
    return ((target_ids[:, None] == source_ids[None, :]) & is_later).any().to(torch.int32)
