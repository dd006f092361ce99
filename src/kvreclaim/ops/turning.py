"""Keys with their slot as position: rotated whenever they move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvreclaim.ops.backend import Backend
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.rope import RopeLayout, rotate


def turn_moved_keys(
    backend: Backend, cache: KVCache, kept: Tensor, target_ids: Tensor, layouts: Sequence[RopeLayout]
) -> None:
    """After a compaction, turn each key by as many positions as it has moved: k e^{i w (new - old)}.

    Args:
        kept:       [L | 1, K | 1, M] int64 ascending: the i-th kept slot has moved to slot i
        target_ids: [blocks] int64, the table after the compaction
        layouts:    the rotation of each layer

    fp32 inside, rounded to the cache's dtype; keys that have not moved keep their bits. Mutates the target
    blocks only. Source: arXiv 2309.17453 section 3.2.
    """
    size, num_kept = cache.block_size, kept.shape[-1]
    slots = torch.arange(num_kept, device=kept.device)
    shifts = slots - kept
    first = int((shifts == 0).flatten(0, 1).all(0).sum())  # kept slots ascend, so shifts never grow back to 0
    mapping = (target_ids[slots // size] * size + slots % size)[first:]
    for layer, layout in zip(cache.layers, layouts, strict=True):
        if layout.num_bands == 0 or first == num_kept:
            continue
        k, v = backend.gather_tokens(PagedTokens(layer, target_ids, num_kept))
        shift = shifts[layer.index if len(shifts) > 1 else 0, :, first:]
        turned = rotate(k[:, first:], shift, layout)
        backend.write_kv(layer, turned.transpose(0, 1), v[:, first:].transpose(0, 1), mapping)
