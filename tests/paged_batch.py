"""A step over a cache whose layers share one block table."""

from __future__ import annotations

from kvreclaim.engine.execute.runner import PagedKVBatch
from kvreclaim.memory.windows import Place
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.kv_cache import KVCache


def paged(ops: Backend, cache: KVCache, batch: AttentionBatch) -> PagedKVBatch:
    places = tuple(Place(0, n) for n in range(cache.num_layers))
    return PagedKVBatch(ops, cache, cache.layers, places, (batch,))
