"""compact: survivors are read into a buffer, some layers at a time, and go from there to their new slots."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.triton.move_kernels import compact_kernel
from kvreclaim.ops.triton.support import padded

TILE_BYTES = 16384
MAX_TILE_SLOTS = 256
ROOM_BYTES = 1 << 26
"""The buffer takes at most so many, or those of one layer."""


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
