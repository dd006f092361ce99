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

_LEAST_SHARE = 1e-6
"""Share of a head that has never needed anything: places that no other head can use go to such heads, too."""


@dataclass(frozen=True)
class Shares(Uneven):
    """Another policy's scores, with counts by each head's need, over all layers.

    All layers and heads together have L K n places, n = budget - protected tokens. A share of them (floor) is
    divided equally, and heads compete for the others:

    by="threshold": the places go to the highest scores of all.
    by="static":    head h gets c share_h(budget / T) T tokens, protected ones included, at least these and at
                    most its live ones; T is the length of the text so far, share_h comes from calibration
                    (head_shares.py), c makes the mean the budget. Tokens that a head no longer holds go to
                    the others in proportion to their shares.

    Source: ours; by threshold within a layer it is Ada-KV, arXiv 2407.11550; static shares around
    streaming_llm are close to DuoAttention, arXiv 2410.10819.

    inner: ranks the tokens; surrogate by default. For "threshold" its scores must be comparable between
           all layers and heads; "static" works with any ranking
    floor: share of the places that is divided equally; it protects heads with slightly low scores
    by:    "threshold" or "static"
    Cost: inner's cost and, by threshold, one selection among all scores.
    """

    floor: float = option(0.0, low=0, high=1)
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
            ideal = self.floor * question.free + (1 - self.floor) * found
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
