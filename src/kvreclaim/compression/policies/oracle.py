"""Oracle: attention of the actual future queries, for evaluation on a given text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvreclaim.compression.attention import attention
from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal
from kvreclaim.ops.scoring import MAX_LOGITS, group_max
from kvreclaim.options import option


@dataclass(frozen=True)
class Oracle(CompressionPolicy):
    """Keeps the tokens that future queries attend to most: an upper bound, for evaluation alone.

        S(j) = max over query heads of aggregate over the coming queries q of softmax_j(s q.K)

    The softmax runs over the keys that are live now: what later tokens will draw away is not in it.
    The coming queries are those of the text with nothing evicted. Works only where the whole text is
    given (LLM.score). Without any query to come all tokens score 0.

    aggregate: over the coming queries, "max" (one look suffices) or "sum" (total attention)
    horizon:   how many of the coming queries count; None for all
    Cost: a product of [N, D] by [D, T] per query head for N coming queries, MAX_LOGITS weights in
    memory at a time; state: the coming queries.
    """

    aggregate: Literal["max", "sum"] = option("max")
    horizon: int | None = option(None, low=1, unit=", or null for all")
    name = "oracle"
    needs = frozenset({Signal.FUTURE_QUERIES})

    def score(self, view: LayerView) -> Tensor:
        assert view.signals.future_queries is not None, f"layer {view.layer}: no queries to come"
        queries = view.signals.future_queries[:, : self.horizon]
        keys = view.keys.float()
        heads, tokens = queries.shape[0], keys.shape[1]
        best = torch.zeros(heads, tokens, dtype=torch.float32, device=keys.device)
        step = max(1, MAX_LOGITS // (heads * tokens))
        for start in range(0, queries.shape[1], step):
            chunk = queries[:, start : start + step]
            weights = attention(view, keys, chunk, view.logical_len + start)
            if self.aggregate == "max":
                best = torch.maximum(best, weights.amax(dim=1))
            else:
                best += weights.sum(dim=1)
        return group_max(best, len(keys))
