"""H2O: heavy hitters by accumulated attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal


@dataclass(frozen=True)
class H2O(CompressionPolicy):
    """Keeps the heavy hitters: tokens that have received the most attention so far.

        S(j) = sum over all queries q so far and the query heads of the KV head of softmax_j(s q.K)

    Not divided by the number of queries that saw the token, as published: old tokens have had more
    time to collect. The recent half of the published cache is CompressionConfig.recent.

    Paper: arXiv 2306.14048.

    Cost: none at a compression; the engine adds the column sums of every query's attention, which is a
    second pass over the keys. State: one fp32 per slot and KV head, which moves with its slot.
    """

    name = "h2o"
    any_layers = True
    needs = frozenset({Signal.ATTENTION_MASS})

    def score(self, view: LayerView) -> Tensor:
        assert view.signals.mass is not None, f"layer {view.layer}: no attention mass"
        return view.signals.mass.float()
