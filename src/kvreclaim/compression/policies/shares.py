"""One threshold for all layers and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import Mode, Trait, Wrapper
from kvreclaim.compression.wrapping import top_counts
from kvreclaim.options import option
from kvreclaim.schedule.way import Way


@dataclass(frozen=True)
class Shares(Wrapper):
    """Another policy's scores, with counts that go to the heads whose scores are high, in whatever layer.

    All layers and heads together have L K n places, n = budget - protected tokens. Every head first gets its
    own top floor(floor n); the places left go to the highest scores of all.

    Source: ours; within a layer it is Ada-KV, arXiv 2407.11550.

    inner: gives the scores, which must mean the same in all layers and heads; surrogate where none is named.
           A policy that lifts scores within a head (segments, protect, critical) is refused
    floor: share of the budget that every head has, whatever its scores
    Cost: that of inner and one sort; memory: a block table per (layer, KV head).
    """

    floor: float = option(0.0, low=0, high=1)
    name = "shares"
    default_inner = "surrogate"
    unfit = tuple(Trait)
    remedy = "wrap a policy that ranks tokens, such as shares(surrogate)"
    way = Way.CELLS
    default_mode = Mode.PER_LAYER_HEAD

    def counts(self, scores: Sequence[Sequence[Tensor]], protected: int, budget: int) -> Tensor:
        heads = [head for layer in scores for head in layer]
        free = budget - protected
        places = min(free * len(heads), sum(map(len, heads)))
        found = top_counts(heads, int(self.floor * free), places)
        return protected + torch.stack(found.split([len(layer) for layer in scores]))
