"""KVzap: a learned score of hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal


@dataclass(frozen=True)
class KVzap(CompressionPolicy):
    """Ranks tokens by what calibration has learnt about hidden states, or somebody else has published:

        score = W h + b   or   W2 gelu(W1 h + b1) + b2

    of what the layer was given of the token, about the logarithm of the most attention that a later query
    will pay it. It means the same in all layers and heads, so let them compete: shares(kvzap). As published,
    a token stays if its score is above a threshold of its own; here the budget says how many do, and the
    published window is CompressionConfig.recent.

    Paper: arXiv 2601.07891.

    Cost: none at a compression; one product per layer with every token that is computed. State: one fp16 per
    slot and KV head, which moves with its slot.
    """

    name = "kvzap"
    needs = frozenset({Signal.TOKEN_SCORES})

    def score(self, view: LayerView) -> Tensor:
        assert view.signals.token_scores is not None, f"layer {view.layer}: no scores of tokens"
        return view.signals.token_scores
