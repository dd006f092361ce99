"""Scores of the native back-end, straight from the blocks; ops/reference/ documents each function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops.extension import native
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.native.views import cache_view
from kvreclaim.ops.rope import RopeLayout


def trig_norm_scores(
    tokens: PagedTokens, queries: Tensor, weights: Tensor | None, layout: RopeLayout
) -> Tensor:
    """reference.trig_norm_scores, both terms in one pass over the keys: [H, T] fp32."""
    scores = torch.empty((queries.shape[0], tokens.num_tokens), dtype=torch.float32)
    native().trig_norm_scores(
        *_where(tokens),
        _plain(queries),
        None if weights is None else _plain(weights),
        layout.start,
        layout.num_bands,
        layout.style == "interleaved",
        scores,
    )
    return scores


def mixture_scores(
    tokens: PagedTokens, centers: Tensor, variances: Tensor, scale: float, over: slice
) -> Tensor:
    """reference.mixture_scores as one blocked product with all centres and offsets: [K, T] fp32.

    Scratch per thread: the logits of as many centres as fit 1 MiB, of four at least.
    """
    begin, end, _ = over.indices(tokens.num_tokens)
    scores = torch.empty((tokens.cache.num_kv_heads, tokens.num_tokens), dtype=torch.float32)
    native().mixture_scores(
        *_where(tokens),
        _plain(centers),
        _plain(variances),
        scale,
        begin,
        end,
        scores,
    )
    return scores


def token_norms(tokens: PagedTokens, *, values: bool) -> Tensor:
    """reference.token_norms: [K, T] fp32."""
    norms = torch.empty((tokens.cache.num_kv_heads, tokens.num_tokens), dtype=torch.float32)
    native().token_norms(*_where(tokens), values, norms)
    return norms


def surrogate_scores(
    tokens: PagedTokens, weights: Tensor, layout: RopeLayout | None, owners: Tensor | None = None
) -> Tensor:
    """reference.surrogate_scores in one pass over keys and values: [K, T] fp32."""
    scores = torch.empty((tokens.cache.num_kv_heads, tokens.num_tokens), dtype=torch.float32)
    native().surrogate_scores(
        *_where(tokens),
        _plain(weights),
        owners,
        0 if layout is None else layout.start,
        0 if layout is None else layout.num_bands,
        layout is not None and layout.style == "interleaved",
        scores,
    )
    return scores


def _where(tokens: PagedTokens) -> tuple[Any, int, Tensor, int]:
    """First arguments of every scoring kernel."""
    return cache_view(tokens.cache), tokens.layer.index, tokens.block_ids, tokens.num_tokens


def _plain(x: Tensor) -> Tensor:
    """fp32 and contiguous; x itself if it is."""
    return x.to(torch.float32).contiguous()
