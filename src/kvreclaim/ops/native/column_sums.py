"""Attention mass of the native back-end; ops/reference/ says what column_sums does."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.kv_cache import LayerCache
from kvreclaim.ops.native.extension import batch_view, cache_view, native


def column_sums(
    q: Tensor,
    layer: LayerCache,
    batch: AttentionBatch,
) -> Tensor:
    """reference.column_sums: q [T, H, D] with any strides, fp32, bf16 or fp16 -> [N, K, C] fp32.

    Any format of the cache: what is not read as it lies goes through fp32 panels, as in paged_attention.
    One pass over the keys for eight query rows at a time (four without AVX-512); a KV head of a sequence is
    one thread's. The result depends neither on the rest of the batch nor on the number of threads. Scratch
    per thread: eight floats per slot.
    """
    columns = int(batch.lengths.max(initial=0))
    sums = torch.empty((len(batch.sequences), layer.cache.num_kv_heads, columns), dtype=torch.float32)
    softmax = layer.softmax
    native().column_sums(
        q,
        sums,
        cache_view(layer.cache),
        layer.index,
        batch_view(batch),
        softmax.scale,
        softmax.softcap or 0.0,
        softmax.window or 0,
        softmax.sinks,
    )
    return sums
