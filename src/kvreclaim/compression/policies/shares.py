"""All layers and heads share one memory: by one threshold, or by what calibration has found each to need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvreclaim.compression.head_shares import share_at
from kvreclaim.compression.policy import CountsQuestion, Signal
from kvreclaim.compression.wrapping import Uneven, fill, top_counts
from kvreclaim.options import option

_LEAST_SHARE = 1e-6
"""Share of a head that has never needed anything: places that nobody else can use go to such heads, too."""


@dataclass(frozen=True)
class Shares(Uneven):
    """Another policy's scores, with counts that go to the heads that need them, in whatever layer.

    All layers and heads together have L K n places, n = budget - protected tokens. Every head first gets its
    own top floor(floor n) of them.

    by="threshold": the places left go to the highest scores of all.
    by="static":    head h gets c share_h(budget / T) T tokens, protected ones included, at least these and at
                    most what it holds; T is the length of the text so far, share_h comes from calibration
                    (head_shares.py), c makes the mean the budget. What a head no longer holds goes to the
                    others in proportion to their shares.

    Source: ours; by threshold within a layer it is Ada-KV, arXiv 2407.11550; static shares around
    streaming_llm are close to DuoAttention, arXiv 2410.10819.

    inner: ranks the tokens; surrogate where none is named. By threshold its scores must mean the same in all
           layers and heads; static shares go with any ranking
    floor: share of the budget that every head has, whatever its scores or its share
    by:    who decides
    Cost: that of inner and, by threshold, one selection among all scores.
    """

    floor: float = option(0.0, low=0, high=1)
    by: Literal["threshold", "static"] = option("threshold")
    name = "shares"
    default_inner = "surrogate"

    @property
    def needs(self) -> frozenset[Signal]:
        return self.inner.needs | ({Signal.HEAD_SHARES} if self.by == "static" else frozenset())

    def counts(self, question: CountsQuestion) -> Tensor:
        safe = int(self.floor * question.free)
        if self.by == "static":
            return question.protected + self._static(question, safe)
        heads = [head for layer in question.scores for head in layer]
        places = min(round(question.free * len(heads)), sum(map(len, heads)))
        found = top_counts(heads, safe, places)
        return question.protected + torch.stack(found.split([len(layer) for layer in question.scores]))

    @staticmethod
    def _static(question: CountsQuestion, safe: int) -> Tensor:
        """[L, K] float64 tokens of each head beside the protected ones."""
        assert question.stats is not None, "needs has HEAD_SHARES"
        given = [stats.head_shares for stats in question.stats if stats.head_shares is not None]
        fraction = question.budget / question.logical_len
        shares = share_at(torch.stack(given).cpu(), question.stats[0].fractions, fraction)
        whole = shares.clamp(min=_LEAST_SHARE) * question.logical_len
        limit = question.limit
        least = limit.clamp(max=safe)
        total = float(question.free * limit.numel() - least.sum())
        return least + fill(whole - question.protected - least, limit - least, total, step=whole)
