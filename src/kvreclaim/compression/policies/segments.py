"""Quotas for segments of the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import LayerView, Signal, Trait, Wrapper
from kvreclaim.compression.wrapping import lift_step
from kvreclaim.options import option

MAX_SEGMENTS = 1 << 20
"""Times a position it must fit into an int64."""


@dataclass(frozen=True)
class Segments(Wrapper):
    """Another policy's ranking, with places reserved for every region of the text.

    The logical positions [0, L) are cut into n equal segments. Of the free places (budget - protected
    tokens) a share is assigned round robin: each segment's best token, then each one's second best, and
    so on, until the share is spent; a segment without tokens left is skipped. The other places go to the
    best remaining tokens of all segments. So every region with evictable tokens keeps some of them, and
    a token keeps its place by its rank among its neighbours.

    The quota applies to each head with a set of its own (per_layer_head); with unequal heads the budget is
    that head's count. In modes with a shared set it applies to the heads' vote.

    inner: ranks the tokens
    n:     segments; 8 keeps a needle among an eighth of its rivals
    share: share of the free places that is assigned round robin, 0 to 1; .5 leaves half to the best overall
    Cost: inner's cost and three sorts of [K, T]; state: logical positions of the slots.
    """

    n: int = option(8, low=1, high=MAX_SEGMENTS, unit=" segments")
    share: float = option(0.5, low=0, high=1)
    name = "segments"
    reranks = True
    unfit = (Trait.KEEPS_ALL, Trait.WHOLE_BLOCKS, Trait.CACHE_RELATIVE)
    remedy = "wrap a policy that ranks tokens, such as segments(snapkv)"

    @property
    def needs(self) -> frozenset[Signal]:
        return self.inner.needs | {Signal.POSITIONS}

    def rerank(self, view: LayerView, scores: Tensor) -> Tensor:
        scores = self.inner.rerank(view, scores)
        assert view.signals.positions is not None, f"layer {view.layer}: no positions"
        rivals = scores[:, view.candidates]
        protected = scores.shape[1] - rivals.shape[1]
        quota = min(int(self.share * (view.budget - protected)), rivals.shape[1])
        if quota <= 0:
            return scores
        positions = view.signals.positions[:, view.candidates].long()
        turns = in_turns(rivals, positions * self.n // view.logical_len)[:, :quota]
        steps = torch.linspace(2.0, 1.0, quota, device=scores.device)
        lifted = scores.amax(dim=1, keepdim=True) + lift_step(scores) * steps
        out = scores.clone()
        out[:, view.candidates] = rivals.scatter(-1, turns, lifted)
        return out


def in_turns(scores: Tensor, segment: Tensor) -> Tensor:
    """Return the order of selection: each segment's best token, by descending score, then each one's second.

    Args:
        scores:  [K, T] float
        segment: [K, T] int64 segment of each token

    Returns: [K, T] int64, a permutation of the tokens per row. Ties: the lowest token first.
    """
    by_score = scores.argsort(dim=-1, descending=True, stable=True)
    group = segment.gather(-1, by_score)
    by_group = group.argsort(dim=-1, stable=True)
    sorted_group = group.gather(-1, by_group)
    first = torch.searchsorted(sorted_group, sorted_group)
    turn = torch.arange(scores.shape[-1], device=scores.device) - first
    turn_by_score = torch.empty_like(turn).scatter_(-1, by_group, turn)
    return by_score.gather(-1, turn_by_score.argsort(dim=-1, stable=True))
