"""One budget for all layers and heads, divided by one threshold or by calibrated shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.head_shares import share_at
from kvreclaim.compression.policy import CountsQuestion, Signal
from kvreclaim.compression.wrapping import Uneven, fill, top_counts
from kvreclaim.options import option

MOST_EQUAL = 0.2
"""Share of the places that the floor takes at most."""
_LEAST_SHARE = 1e-6
"""Share of a head that has never needed anything: places that no other head can use go to such heads, too."""


@dataclass(frozen=True)
class Shares(Uneven):
    """Another policy's scores, with counts by each head's need, over all layers.

    All layers and heads together have L K n places, n = budget - protected tokens. Each head has
    min(floor T, n / 5) of its own, T being the length of the text so far. Heads compete for the others:

    by="threshold": the places go to the highest scores of all.
    by="static":    head h gets c share_h(budget / T) T tokens, protected ones included, at least these and at
                    most its live ones; share_h comes from calibration (head_shares.py), c makes the mean the
                    budget. Tokens that a head no longer holds go to the others in proportion to their shares.

    Source: ours; by threshold within a layer it is Ada-KV, arXiv 2407.11550; static shares around
    streaming_llm are close to DuoAttention, arXiv 2410.10819.

    inner: ranks the tokens; surrogate by default. For "threshold" its scores must be comparable between
           all layers and heads; "static" works with any ranking
    floor: tokens of each head outside the competition, as a share of the text, at most a fifth of the places;
           protects heads with slightly low scores (docs/log.md)
    by:    "threshold" or "static"
    Cost: inner's cost and, by threshold, one selection among all scores.
    """

    floor: float = option(0.0, low=0, high=MOST_EQUAL)
    by: Literal["threshold", "static"] = option("threshold")
    name = "shares"
    default_inner = "surrogate"

    @property
    def needs(self) -> frozenset[Signal]:
        return self.inner.needs | ({Signal.HEAD_SHARES} if self.by == "static" else frozenset())

    def counts(self, question: CountsQuestion) -> Tensor:
        found = self._static(question) if self.by == "static" else self._by_threshold(question)
        if self.floor:
            found = found.cpu()
            part = min(MOST_EQUAL, self.floor * question.logical_len / max(1.0, question.free))
            ideal = part * question.free + (1 - part) * found
            found = fill(ideal, question.limit, float(found.sum()))
        return question.protected_on(found.device) + found

    @staticmethod
    def _by_threshold(question: CountsQuestion) -> Tensor:
        """Return [L, K] float64 unprotected tokens of each head, on the scores' device."""
        heads = [head for layer in question.scores for head in layer]
        places = min(round(question.free * len(heads)), sum(map(len, heads)))
        return top_counts([heads], 0, np.array([places])).view(len(question.scores), -1)

    @staticmethod
    def _static(question: CountsQuestion) -> Tensor:
        """Return [L, K] float64 unprotected tokens of each head by the calibrated shares."""
        assert question.stats is not None, "needs has HEAD_SHARES"
        given = [stats.head_shares for stats in question.stats if stats.head_shares is not None]
        fraction = question.budget / question.logical_len
        shares = share_at(torch.stack(given).cpu(), question.stats[0].fractions, fraction)
        whole = shares.clamp(min=_LEAST_SHARE) * question.logical_len
        limit = question.limit
        return fill(whole - question.protected, limit, float(question.free * limit.numel()), step=whole)
