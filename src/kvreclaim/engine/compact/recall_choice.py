"""Choose the recalled pages and their recall blocks: [.., R] of [.., P] pages, any leading dims."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PATIENCE = math.log(1.1)
"""Advantage of a recalled page, so that pages of nearly equal benefit do not alternate."""


def ranked(benefit: Tensor, tries: Tensor, hot: Tensor, stays: Tensor) -> Tensor:
    """Rank pages by the logarithm of their benefit [.., P], halved for each recall without a win. Pages that
    are still recalled (hot [.., R] where stays) get a small advantage."""
    return (benefit - tries * math.log(2.0)).scatter_add(-1, hot, stays * PATIENCE)


def best_pages(rank: Tensor, hot: Tensor, stays: Tensor) -> tuple[Tensor, Tensor]:
    """Assign the R best pages to blocks. A recalled page keeps its block, the others take the remaining ones.

    Args:
        rank:  [.., P] fp32; hot: [.., R] int64 before
        stays: [.., R] bool, whether each block still holds its page

    Returns: hot [.., R] after; fresh [.., R] bool, blocks that are to be written.
    """
    best = rank.topk(hot.shape[-1], dim=-1).indices
    same = (best[..., :, None] == hot[..., None, :]) & stays[..., None, :]  # [.., new, block]
    fresh, comes = ~same.any(-2), ~same.any(-1)
    order = comes.int().argsort(dim=-1, descending=True, stable=True)  # those that come first, in order
    queue = best.take_along_dim(order, -1)
    turn = (fresh.cumsum(-1) - 1).clamp(min=0)
    return torch.where(fresh, queue.take_along_dim(turn, -1), hot), fresh
