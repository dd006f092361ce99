"""Compaction of the native back-end."""

from __future__ import annotations

from torch import Tensor

from kvreclaim.ops.formats import kivi
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.native.extension import cache_view, native
from kvreclaim.ops.native.kivi import WORDS


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """reference.compact in place, all layers in one call.

    Args:
        kept:       [L | 1, K | 1, M] int64 slots of the old table, strictly ascending
        source_ids: [blocks] int64, the table before
        target_ids: [>= ceil(M / S)] int64, the table after, no block twice

    A target block whose tokens stay is not touched. The order is ascending, so nothing is read after it
    was overwritten as long as a target block lies at the same or an earlier place in the old table, or in
    none; otherwise each head is gathered in scratch first. What lies past slot M in the last target is
    unspecified. Raises: ValueError, before anything moves, for slots or blocks outside their range.
    """
    if cache.open is not None:
        return kivi.compact(cache, kept, source_ids, target_ids, WORDS)
    native().compact(cache_view(cache), kept.contiguous(), source_ids, target_ids)
