"""KVzap: a learned score of hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal


@dataclass(frozen=True)
class KVzap(CompressionPolicy):
    """Ranks tokens by a score of their hidden states, with weights from calibration or published ones:

        score = W h + b   or   W2 gelu(W1 h + b1) + b2

    of the layer's input for the token; it estimates the logarithm of the largest later attention weight.
    Scores are comparable between layers and heads, so let heads compete: shares(kvzap). As published, a
    token stays if its score is above a threshold; here the budget decides, and the published window is
    CompressionConfig.recent.

    Paper: arXiv 2601.07891.

    Cost: none at a compression; one product per layer with every token that is computed. State: one fp16 per
    slot and KV head, which moves with its slot.
    """

    name = "kvzap"
    any_layers = True
    needs = frozenset({Signal.TOKEN_SCORES})

    def score(self, view: LayerView) -> Tensor:
        assert view.signals.token_scores is not None, f"layer {view.layer}: no scores of tokens"
        return view.signals.token_scores
