"""PyramidKV: more tokens in low layers, fewer in high ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import CountsQuestion
from kvreclaim.compression.wrapping import Uneven, fill
from kvreclaim.options import option


@dataclass(frozen=True)
class PyramidKV(Uneven):
    """Another policy's scores, with counts that decrease linearly with depth.

    With C = budget - protected tokens and T evictable tokens per head,

        last = C / beta,  first = 2 C - last;  if first >= T:  first = T,  last = 2 C - T
        count_l = protected + first - l (first - last) / (L - 1)

    so that the mean is the budget. If heads hold fewer tokens than that (after earlier passes), the
    difference is divided equally among the others.

    Paper: arXiv 2406.02069.

    inner: ranks the tokens within a head; snapkv by default, as published
    beta:  steepness: C over the last layer's count; 20 as published, 1 is flat
    Cost: inner's cost.
    """

    beta: float = option(20.0, low=1, high=math.inf)
    name = "pyramidkv"

    def counts(self, question: CountsQuestion) -> Tensor:
        limit, average = question.limit, question.free
        layers, most = len(limit), float(limit.max())
        last = average / self.beta
        if 2 * average - last >= most:
            last = 2 * average - most
        ramp = torch.linspace(2 * average - last, last, layers, dtype=torch.float64)
        ramp = ramp if layers > 1 else limit.new_full((1,), average)
        return question.protected + fill(ramp[:, None].expand_as(limit), limit, average * limit.numel())
