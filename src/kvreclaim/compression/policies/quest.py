"""Quest: read only the blocks that can matter to this query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


@dataclass(frozen=True)
class Quest(CompressionPolicy):
    """Keeps every token, and at each decode step reads the blocks with the highest bound on q . k:

        bound = sum over channels of max(q_f low_f, q_f high_f) >= q . k for every key k of the block

    with low and high the least and the greatest entry of the block's keys per channel; the maximum
    over the query heads of a KV head. The budget is the number of tokens read per KV head.

    It saves reads, not memory: no block is freed, and none is changed, so that prefixes stay shared.

    Paper: arXiv 2406.10774.

    Cost: two products of [G, D] by [D, N] per KV head and step for N blocks; state: low and high per
    block, which belong to the block.
    """

    name = "quest"
    eviction_method = EvictionMethod.READS

    def score(self, view: LayerView) -> Tensor:
        return torch.zeros(view.source.shape, dtype=torch.float32, device=view.source.device)

    def block_scores(self, queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
        grouped = queries.float().unflatten(-2, (low.shape[-3], -1))
        bound = grouped.clamp(min=0.0) @ high.float().mT + grouped.clamp(max=0.0) @ low.float().mT
        return bound.amax(dim=-2)
