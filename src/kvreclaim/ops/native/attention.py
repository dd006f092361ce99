"""Attention of the native back-end; ops/reference/ documents each function."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.extension import KERNELS, native
from kvreclaim.ops.kv_cache import LayerCache
from kvreclaim.ops.native.linear import all_rows_are_exact
from kvreclaim.ops.native.views import make_batch, make_layer, make_runs


def paged_attention(q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
    """reference.paged_attention: q [T, H, D] with any strides, fp32, bf16 or fp16 -> [T, H, Dv], dtype of q.

    fp32 and bf16 caches are read as they lie; others are decoded into fp32 panels of 64 tokens in scratch of
    the thread. Where the CPU has AVX-512 VNNI, decode of int8 and int4 with 16-bit queries multiplies
    integers instead: q and the weights rounded to 16 bits, see csrc/include/kvreclaim/integer_loops.h.
    Keys are cut at fixed slots and the parts merged, so that one long sequence uses all threads and a row
    depends neither on the rest of the batch nor on the number of threads, nor, up to EXACT_QUERIES rows of a
    sequence, on other rows. Inside exact_rows() longer prompts are cut into runs of so many rows.
    """
    out = q.new_empty((q.shape[0], q.shape[1], layer.cache.shape.v_dim))
    place, softmax = layer.cached("native", make_layer)
    view = batch.cached("runs", make_runs) if all_rows_are_exact() else batch.cached("native", make_batch)
    KERNELS.paged_attention(q, out, *place, view, *softmax)
    return out


def column_sums(q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
    """reference.column_sums: q [T, H, D] with any strides, fp32, bf16 or fp16 -> [N, K, C] fp32.

    Any format of the cache: what is not read as it lies goes through fp32 panels, as in paged_attention.
    One pass over the keys for eight query rows at a time (four without AVX-512); a KV head of a sequence is
    one thread's. The result depends neither on the rest of the batch nor on the number of threads. Scratch
    per thread: eight floats per slot.
    """
    columns = int(batch.lengths.max(initial=0))
    sums = torch.empty((len(batch.sequences), layer.cache.num_kv_heads, columns), dtype=torch.float32)
    place, softmax = layer.cached("native", make_layer)
    native().column_sums(q, sums, *place, batch.cached("native", make_batch), *softmax)
    return sums
