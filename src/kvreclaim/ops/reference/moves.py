"""Writes, compaction and copies of the reference back-end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.reference.rows import store_rows


def write_kv(layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store new tokens' keys and values in their slots.

    Args:
        k, v:         [T, K, D], keys already rotated
        slot_mapping: [T] int64, block * S + offset, no slot twice

    Mutates the cache at these slots only.
    """
    cache = layer.cache
    block, offset = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    for plane, rows in zip(layer.planes, store_rows(cache, k, v), strict=True):
        plane[block, :, offset] = rows


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Slide the kept tokens of one sequence together: the i-th kept slot goes to slot i.

    Args:
        kept:       [L | 1, K | 1, M] int64 ascending slots of the old table
        source_ids: [blocks] int64, the table before; target_ids: the table after, ceil(M / S) blocks

    Every layer is read whole before it is written, so sources and targets may overlap.
    Mutates the target blocks only; what lies past slot M in the last one becomes zero bytes.
    """
    for layer in cache.layers:
        row = kept[layer.index if kept.shape[0] > 1 else 0]
        for plane in layer.planes:
            compact_layer(plane, row, source_ids, target_ids)


def compact_layer(x: Tensor, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """compact for one plane of one layer.

    Args:
        x:    [B, K, S, D] in any strides and any dtype that can be indexed; mutated
        kept: [K | 1, M] int64 ascending
    """
    heads, size, dim = x.shape[1:]
    slots = kept.expand(heads, -1)
    head = torch.arange(heads, device=kept.device)[:, None]
    survivors = x[source_ids[slots // size], head, slots % size]
    padded = F.pad(survivors, (0, 0, 0, target_ids.numel() * size - kept.shape[-1]))
    x[target_ids] = padded.view(heads, -1, size, dim).transpose(0, 1)


def copy_blocks(cache: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (source, target) in all layers, as if at once: every source is read as it was before
    the call, also if it is a target. No target twice."""
    source, target = torch.tensor(pairs, device=cache.device).unbind(1)
    for plane in cache.planes:
        plane[:, target] = plane[:, source]


def prepare_blocks(cache: KVCache, block_ids: list[int]) -> None:
    """Make freshly allocated blocks safe to attend over: zero them, so that what another request left
    there (a NaN, say) is never multiplied by a zero probability."""
    index = torch.tensor(block_ids, device=cache.device)
    for plane in cache.planes:
        plane.index_fill_(1, index, 0)
