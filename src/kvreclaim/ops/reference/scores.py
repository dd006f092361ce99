"""Scores and choices of the reference back-end over gathered keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops import scoring
from kvreclaim.ops.head_rows import runs, spread
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.reference.rows import gather_tokens
from kvreclaim.ops.rope import RopeLayout

PIECE = 4096
"""Tokens whose features are held at once, of each head."""


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


def surrogate_scores(
    tokens: PagedTokens,
    weights: Tensor,
    layout: RopeLayout | None,
    owners: Tensor | None = None,
    *,
    gather: Callable[[PagedTokens], tuple[Tensor, Tensor]] = gather_tokens,
) -> Tensor:
    """scoring.surrogate_scores of a paged sequence, PIECE tokens at a time: [K, T] fp32.

    Args:
        weights: [K, P] of each head; with owners [R, P]
        owners:  [blocks] int64, which row of the weights the tokens of each block are scored with, where the
                 table holds those of several heads or layers; K is then 1
    """
    size, scores = tokens.cache.block_size, []
    step = max(1, PIECE // size)
    for first in range(0, tokens.block_ids.shape[-1], step):
        ids = tokens.block_ids[..., first : first + step]
        heads = None if tokens.heads is None else tokens.heads[first : first + step]
        length = min(ids.shape[-1] * size, tokens.num_tokens - first * size)
        part = PagedTokens(tokens.layer, ids, length, heads)
        rows = weights
        if owners is not None:
            rows = weights[owners[first : first + step]].repeat_interleave(size, dim=0)[
                None, : part.num_tokens
            ]
        scores.append(scoring.surrogate_scores(*gather(part), rows, layout))
    return torch.cat(scores, dim=1)


def select_top(scores: Tensor, places: int) -> Tensor:
    """Return the indices of the `places` highest scores of each row.

    Args:
        scores: [R, N] float; -inf is allowed, NaN is not
        places: 0 <= places <= N

    Returns: [R, places] int64 ascending; of equal scores the lowest indices win.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :places]
    return best.sort(dim=-1).values


def select_runs(scores: Tensor, starts: np.ndarray, lengths: np.ndarray, places: np.ndarray) -> Tensor:
    """Return the indices of the highest scores of each of several runs, unequally many.

    Args:
        scores:  [N] float; -inf is allowed, NaN is not
        starts:  [R] int64, first score of each run; lengths: [R] int64; no two runs overlap
        places:  [R] int64, 0 <= places <= lengths

    Returns: [sum of places] int64, ascending within each run; of equal scores the lowest indices win.
    """
    device, index = scores.device, runs(starts, lengths, scores.device)
    rivals = scores.index_select(0, index)
    owners = spread(np.arange(len(starts)), lengths, device)
    by_score = rivals.sort(descending=True, stable=True).indices
    by_run = by_score.index_select(0, owners.index_select(0, by_score).sort(stable=True).indices)
    best = by_run.index_select(0, runs(lengths.cumsum() - lengths, places, device))
    return index.index_select(0, best.sort().values)
