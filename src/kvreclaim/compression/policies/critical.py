"""Critical KV: tokens weighed by their value's effect on the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import LayerView, Signal, Trait, Wrapper
from kvreclaim.ops.scoring import MAX_LOGITS
from kvreclaim.options import option

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Critical(Wrapper):
    """Reranks the tokens of another policy by their largest effect on the output.

        first half of the budget: the top tokens by the inner score A
        the rest:                 the top ones by (A - min(0, min A)) * mean_h ||W_o,h v||_1

    over the evictable tokens, per layer and KV head, the mean over the query heads of the KV head. An
    inner score that can be negative (a z-score, a negated norm) is shifted up to a least value of 0;
    attention scores are unchanged. Scores: 2 down to more than 1 by rank for the first half; the products of
    the rest relative to their greatest one, 0 to 1.

    Paper: arXiv 2502.03805. Best around a policy that does not weigh with ||v|| itself.

    inner:       the reranked policy; with unequal heads the halves are of each head's own
                 budget
    first_stage: share of the budget that is chosen by the inner score alone; .5 as published
    Cost: inner's cost and a product of [T, Dv] by [Dv, M] per query head, M the model's hidden size;
    state: inner's state.
    """

    first_stage: float = option(0.5, low=0, high=1)
    name = "critical"
    any_layers = False  # it reads W_o, which a stack would copy for all layers
    reranks = True
    unfit = (Trait.KEEPS_ALL, Trait.WHOLE_BLOCKS)
    remedy = "wrap a policy that ranks tokens, such as critical(snapkv)"

    @property
    def needs(self) -> frozenset[Signal]:
        return self.inner.needs | {Signal.OUTPUT_PROJECTION}

    def rerank(self, view: LayerView, scores: Tensor) -> Tensor:
        inner = self.inner.rerank(view, scores)
        scores = torch.zeros_like(inner)
        part = inner[:, view.candidates]
        num_candidates = part.shape[1]
        if num_candidates == 0:
            return scores
        places = max(0, min(view.budget - inner.shape[1] + num_candidates, num_candidates))
        first = part.sort(dim=1, descending=True, stable=True).indices[:, : int(places * self.first_stage)]
        worth = (part - part.amin(dim=1, keepdim=True).clamp_max(0)) * self._output_norms(view)
        worth /= worth.scatter(1, first, 0.0).amax(dim=1, keepdim=True).clamp_min(TINY)
        ranks = torch.linspace(2, 1, first.shape[1] + 1, device=part.device)[:-1].expand_as(first)
        scores[:, view.candidates] = worth.clamp_max(1.0).scatter(1, first, ranks)
        return scores

    @staticmethod
    def _output_norms(view: LayerView) -> Tensor:
        """Return mean_h ||W_o,h v||_1 of the candidates: [K, n] fp32."""
        projection = view.signals.output_projection
        assert projection is not None, f"layer {view.layer}: no output projection"
        values = view.values[:, view.candidates]
        by_head = projection.unflatten(0, (len(values), -1))
        step = max(1, MAX_LOGITS // by_head.shape[-1])
        return torch.stack([_mean_norms(*pair, step) for pair in zip(values, by_head, strict=True)])


def _mean_norms(values: Tensor, heads: Tensor, step: int) -> Tensor:
    """Return [n] fp32 of values [n, Dv] and heads [G, Dv, M], `step` tokens of one query head at a time."""
    chunks = values.float().split(step)
    norms = [torch.cat([(chunk @ head.float()).abs().sum(dim=-1) for chunk in chunks]) for head in heads]
    return torch.stack(norms).mean(dim=0)
