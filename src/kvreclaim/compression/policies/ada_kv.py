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
    """Another policy's scores, with counts that go to the heads whose scores are high.

    Each layer has K n places for K heads, n = budget - protected tokens. Every head first gets its own
    top floor(alpha n); the places left go to the highest scores of the layer, whatever their head.

    Paper: arXiv 2407.11550.

    inner: gives the scores, which must mean the same in all heads of a layer; snapkv, as published,
           where none is named
    alpha: share of the budget that is safe in every head; .2 as published
    Cost: that of inner and one sort per layer.
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
