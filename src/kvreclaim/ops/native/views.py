"""Views of caches and batches for the compiled module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.cells import CellBatch
from kvreclaim.ops.extension import native
from kvreclaim.ops.formats.hadamard import sign_tensor
from kvreclaim.ops.kv_cache import KVCache, LayerCache

LAYOUTS = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4")
"""KV formats in the order of csrc's kCacheFormats."""
EXACT_QUERIES = 33
"""Rows of a sequence up to which each is, to the bit, what it would be alone, as a decode step's only row: a
token and the drafts behind it. The kernels' bound. More are a prefill, which is computed in another order."""


def cache_view(cache: KVCache) -> Any:
    """Return the extension's view of a cache, made once."""
    return cache.cached("native", make_cache)


def make_cache(cache: KVCache) -> Any:
    """Make the extension's view of a cache, for `cached`."""
    shape, form = cache.shape, cache.format
    dims = (*shape.units, shape.block_size, shape.k_dim, shape.v_dim)
    signs = tuple(sign_tensor(dim, cache.device) for dim in (shape.k_dim, shape.v_dim))
    return native().Cache(
        LAYOUTS.index(form.name), dims, shape.latent, list(cache.planes), signs if form.is_rotated else None
    )


def make_layer(layer: LayerCache) -> tuple[tuple[Any, int], tuple[Any, ...]]:
    """Make a layer's kernel arguments, for `cached`: its cache, its place there and its softmax."""
    rule = layer.softmax
    return (cache_view(layer.cache), layer.index), (
        rule.scale,
        rule.softcap or 0.0,
        rule.window or 0,
        rule.sinks,
    )


def make_batch(batch: AttentionBatch) -> Any:
    """Make the extension's view of a step's sequences, for `cached`."""
    if isinstance(batch, CellBatch):
        given = batch.given
        return native().Batch.from_arrays(
            batch.block_size, given.block_table, given.query_starts, given.seq_lens, given.shifts
        )
    return _view(batch, batch.sequences)


def make_runs(batch: AttentionBatch) -> Any:
    """Make a view with at most EXACT_QUERIES rows per sequence, for `cached`. Cells of single heads stay
    whole: they are those of compressed caches."""
    if isinstance(batch, CellBatch):
        return batch.cached("native", make_batch)
    return _view(batch, batch.runs(EXACT_QUERIES))


def _view(batch: AttentionBatch, sequences: Iterable[SequenceSlots]) -> Any:
    view = native().Batch(batch.block_size)
    for seq in sequences:
        view.add(seq.block_ids, seq.query_len, seq.seq_len, seq.shift, seq.slot_positions)
    return view
