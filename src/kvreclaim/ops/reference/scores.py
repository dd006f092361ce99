"""Scores and choices of the reference back-end over gathered keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops import scoring
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.reference.rows import gather_tokens
from kvreclaim.ops.rope import RopeLayout


def trig_norm_scores(
    tokens: PagedTokens, queries: Tensor, weights: Tensor | None, layout: RopeLayout
) -> Tensor:
    """scoring.trig_norm_scores of a paged sequence's keys: [H, T] fp32."""
    keys = gather_tokens(tokens)[0]
    return scoring.trig_norm_scores(keys, queries, weights, layout)


def mixture_scores(
    tokens: PagedTokens, centers: Tensor, variances: Tensor, scale: float, over: slice
) -> Tensor:
    """scoring.mixture_scores of a paged sequence's keys: [K, T] fp32."""
    keys = gather_tokens(tokens)[0]
    return scoring.mixture_scores(keys, centers, variances, scale, over)


def token_norms(tokens: PagedTokens, *, values: bool) -> Tensor:
    """||k|| or ||v|| of a paged sequence: [K, T] fp32."""
    keys_values = gather_tokens(tokens)
    return torch.linalg.vector_norm(keys_values[values], dim=-1, dtype=torch.float32)


def select_top(scores: Tensor, places: int) -> Tensor:
    """The indices of the `places` highest scores of each row.

    Args:
        scores: [R, N] float; -inf is allowed, NaN is not
        places: 0 <= places <= N

    Returns: [R, places] int64 ascending; of equal scores the lowest indices win.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :places]
    return best.sort(dim=-1).values
