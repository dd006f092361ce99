"""Scores of the native back-end, straight from the blocks; ops/reference.py says what each function does."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.native.extension import cache_view, native
from kvreclaim.ops.rope import RopeLayout


def trig_norm_scores(
    cache: KVCache,
    layer: int,
    block_ids: Tensor,
    num_tokens: int,
    queries: Tensor,
    weights: Tensor | None,
    layout: RopeLayout,
) -> Tensor:
    """reference.trig_norm_scores, both terms in one pass over the keys: [H, T] fp32."""
    scores = torch.empty((queries.shape[0], num_tokens), dtype=torch.float32)
    native().trig_norm_scores(
        cache_view(cache),
        layer,
        block_ids,
        num_tokens,
        _plain(queries),
        None if weights is None else _plain(weights),
        layout.start,
        layout.num_bands,
        layout.style == "interleaved",
        scores,
    )
    return scores


def mixture_scores(
    cache: KVCache,
    layer: int,
    block_ids: Tensor,
    num_tokens: int,
    centers: Tensor,
    variances: Tensor,
    scale: float,
    over: slice,
) -> Tensor:
    """reference.mixture_scores as one blocked product with all centres and offsets: [K, T] fp32.

    Scratch per thread: the logits of as many centres as fit 1 MiB, of four at least.
    """
    begin, end, _ = over.indices(num_tokens)
    scores = torch.empty((cache.num_kv_heads, num_tokens), dtype=torch.float32)
    native().mixture_scores(
        cache_view(cache),
        layer,
        block_ids,
        num_tokens,
        _plain(centers),
        _plain(variances),
        scale,
        begin,
        end,
        scores,
    )
    return scores


def key_norms(cache: KVCache, layer: int, block_ids: Tensor, num_tokens: int) -> Tensor:
    """reference.key_norms: [K, T] fp32."""
    return _norms(cache, layer, block_ids, num_tokens, values=False)


def value_norms(cache: KVCache, layer: int, block_ids: Tensor, num_tokens: int) -> Tensor:
    """reference.value_norms: [K, T] fp32."""
    return _norms(cache, layer, block_ids, num_tokens, values=True)


def _norms(cache: KVCache, layer: int, block_ids: Tensor, num_tokens: int, *, values: bool) -> Tensor:
    norms = torch.empty((cache.num_kv_heads, num_tokens), dtype=torch.float32)
    native().token_norms(cache_view(cache), layer, block_ids, num_tokens, values, norms)
    return norms


def _plain(x: Tensor) -> Tensor:
    """fp32 and contiguous; x itself if it is."""
    return x.to(torch.float32).contiguous()
