"""TOVA: attention of the last query, with one choice per layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.attention import window_attention
from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal


@dataclass(frozen=True)
class TOVA(CompressionPolicy):
    """Keeps the tokens that the last query attends to most, the same ones for all heads of a layer.

        S(j) = mean over all query heads of the layer of softmax_j(s q.K), q the last query

    All KV heads share this score, so that each layer keeps one set in the default mode.

    Paper: arXiv 2401.06104, which drops one token per step; here each compression evicts all tokens
    over the budget. Published without sinks or recent tokens: CompressionConfig.sinks = recent = 0.

    Cost: one product of [H, D] by [D, T]; state: one query per layer.
    """

    name = "tova"
    any_layers = True
    needs = frozenset({Signal.RECENT_QUERIES})

    @property
    def query_window(self) -> int:
        return 1

    def score(self, view: LayerView) -> Tensor:
        weights = window_attention(view)[:, -1].unflatten(0, (view.num_layers, -1))
        return weights.mean(dim=1).repeat_interleave(view.source.shape[0] // view.num_layers, dim=0)
