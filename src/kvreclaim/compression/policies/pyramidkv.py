"""PyramidKV: more tokens in low layers, fewer in high ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import Mode, Trait, Wrapper
from kvreclaim.compression.wrapping import fill
from kvreclaim.options import option
from kvreclaim.schedule.way import Way


@dataclass(frozen=True)
class PyramidKV(Wrapper):
    """Another policy's scores, with counts that fall linearly with depth.

    With C = budget - protected tokens and T tokens that may go, per head,

        last = C / beta,  first = 2 C - last;  if first >= T:  first = T,  last = 2 C - T
        count_l = protected + first - l (first - last) / (L - 1)

    so that the mean is the budget. Where heads hold fewer tokens than that (after earlier passes), the
    difference goes to all others alike.

    Paper: arXiv 2406.02069.

    inner: ranks the tokens within a head; snapkv, as published, where none is named
    beta:  steepness: C over the last layer's count; 20 as published, 1 is flat
    Cost: that of inner; memory: a block table per (layer, KV head).
    """

    beta: float = option(20.0, low=1, high=math.inf)
    name = "pyramidkv"
    default_inner = "snapkv"
    unfit = tuple(trait for trait in Trait if trait is not Trait.LIFTS)
    remedy = "wrap a policy that ranks tokens, such as pyramidkv(snapkv)"
    way = Way.CELLS
    default_mode = Mode.PER_LAYER_HEAD

    def counts(self, scores: Sequence[Sequence[Tensor]], protected: int, budget: int) -> Tensor:
        limit = torch.tensor([[len(head) for head in layer] for layer in scores], dtype=torch.float64)
        layers, average = limit.shape[0], float(budget - protected)
        last = average / self.beta
        first = 2 * average - last
        if first >= limit.max():
            first = float(limit.max())
            last = 2 * average - first
        ramp = (
            torch.linspace(first, last, layers, dtype=torch.float64)
            if layers > 1
            else limit.new_full((1,), average)
        )
        return protected + fill(ramp[:, None].expand_as(limit), limit, average * limit.numel())
