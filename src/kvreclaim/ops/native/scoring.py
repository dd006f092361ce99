"""Scores of the native back-end, straight from the blocks, and the best of each row; ops/reference/
documents each function."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.extension import native
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.native.storage import cache_view
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


def select_top(scores: Tensor, places: int) -> Tensor:
    """Return the indices of the `places` highest scores of each row.

    Args:
        scores: [R, N] fp32 on the CPU; -inf is allowed, NaN is not
        places: 0 <= places <= N

    Returns: [R, places] int64 ascending, the set that a stable descending sort puts first: of equal
        scores the lowest indices. Mutates nothing.
    Raises: InvalidArgumentError if a score is NaN; ValueError if places is above N.
    """
    kept = torch.empty((scores.shape[0], places), dtype=torch.int64)
    _select(scores.contiguous(), kept)
    return kept


def select_runs(scores: Tensor, starts: np.ndarray, lengths: np.ndarray, places: np.ndarray) -> Tensor:
    """reference.select_runs, run by run. Raises: InvalidArgumentError if a score is NaN."""
    kept, end = torch.empty(int(places.sum()), dtype=torch.int64), 0
    for start, length, count in zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True):
        own = kept[None, end : end + count]
        _select(scores[None, start : start + length], own)
        own += start
        end += count
    return kept


def _select(scores: Tensor, kept: Tensor) -> None:
    if native().select_top(scores, kept):
        raise InvalidArgumentError(
            "a score is NaN, so nothing can be ranked; check the policy, the statistics and the KV cache."
        )
