"""Ada-KV: heads compete for their layer's budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import Mode, Trait, Wrapper
from kvreclaim.compression.wrapping import fill, top_counts
from kvreclaim.options import option
from kvreclaim.schedule.way import Way


@dataclass(frozen=True)
class AdaKV(Wrapper):
    """Another policy's scores, with counts that go to the heads whose scores are high.

    Each layer has K n places for K heads, n = budget - protected tokens. Every head first gets its own
    top floor(alpha n); the places left go to the highest scores of the layer, whatever their head.

    Paper: arXiv 2407.11550.

    inner: gives the scores, which must mean the same in all heads of a layer; snapkv, as published,
           where none is named. A policy that lifts scores within a head (segments, protect, critical) is
           refused
    alpha: share of the budget that is safe in every head; .2 as published
    Cost: that of inner and one sort per layer; memory: a block table per (layer, KV head).
    """

    alpha: float = option(0.2, low=0, high=1)
    name = "ada_kv"
    default_inner = "snapkv"
    unfit = tuple(Trait)
    remedy = "wrap a policy that ranks tokens, such as ada_kv(snapkv)"
    way = Way.CELLS
    default_mode = Mode.PER_LAYER_HEAD

    def counts(self, scores: Sequence[Sequence[Tensor]], protected: int, budget: int) -> Tensor:
        free = budget - protected
        limit = torch.tensor([[len(head) for head in layer] for layer in scores], dtype=torch.float64)
        room = limit.sum(dim=1)
        places = fill(torch.full_like(room, free * limit.shape[1]), room, float(free * limit.numel()))
        safe = int(self.alpha * free)
        rows = [top_counts(layer, safe, int(p)) for layer, p in zip(scores, places.round(), strict=True)]
        return protected + torch.stack(rows)
