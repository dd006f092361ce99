"""Ada-KV: heads compete for their layer's budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import CountsQuestion
from kvreclaim.compression.wrapping import Uneven, fill, top_counts
from kvreclaim.options import option


@dataclass(frozen=True)
class AdaKV(Uneven):
    """Another policy's scores, with higher counts for heads with high scores.

    Each layer has K n places for K heads, n = budget - protected tokens. Every head first gets its own
    top floor(alpha n); the remaining places go to the highest scores of the layer, in any head.

    Paper: arXiv 2407.11550.

    inner: policy that scores; scores must be comparable between the heads of a layer. Default: snapkv,
           as published
    alpha: share of the budget that every head keeps; .2 as published
    Cost: inner's cost and one sort per layer.
    """

    alpha: float = option(0.2, low=0, high=1)
    name = "ada_kv"

    def counts(self, question: CountsQuestion) -> Tensor:
        limit, free = question.limit, question.free
        room = limit.sum(dim=1)
        places = fill(torch.full_like(room, free * limit.shape[1]), room, float(free * limit.numel()))
        safe = int(self.alpha * free)
        counts = top_counts(question.scores, safe, places.round().long().numpy())
        return question.protected_on(counts.device) + counts
