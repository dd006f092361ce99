"""Common parts of wrappers: ranking tokens before others, and unequal counts per head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode, Trait, Wrapper
from kvreclaim.ops.moving import to_device
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

_LARGEST_BLOCK = 4096
_MARGIN = 2.0**-10
_STEPS = 100


@dataclass(frozen=True)
class Uneven(Wrapper):
    """A wrapper that ranks tokens by another policy and sets its own counts per head. Memory: a block table
    per (layer, KV head)."""

    default_inner = "snapkv"
    eviction_method = EvictionMethod.CELLS
    default_mode = Mode.PER_LAYER_HEAD

    unfit = tuple(Trait)

    @property
    def remedy(self) -> str:
        return f"wrap a policy that ranks tokens, such as {self.name}({self.default_inner})"


def top_counts(groups: Sequence[Sequence[Tensor]], safe: int, places: np.ndarray) -> Tensor:
    """Count the highest `places` scores of each of N groups of K heads by head, after each head's `safe` best
    ones: [N, K] float64 on the scores' device, without a synchronisation. Ties: the first head, the first
    token. No sort: all scores are compared with the lowest one that has a place.

    groups: [T] of each head, no NaN; T may differ
    places: [N] int64
    """
    if safe:
        groups = _with_safe(groups, safe)
    counts = np.array([[len(head) for head in heads] for heads in groups])
    sizes, most = counts.sum(axis=1), int(places.max())
    first = groups[0][0]
    if most == 0:
        return first.new_zeros(counts.shape, dtype=torch.float64)
    # infinities behind each group make its last place the same rank in all; one column before lets sums begin
    lead = most - places
    width = 1 + int((sizes + lead).max())
    low, high = first.new_full((width,), -torch.inf), first.new_full((int(lead.max()),), torch.inf)
    padding = zip(groups, lead.tolist(), (width - 1 - sizes - lead).tolist(), strict=True)
    parts = [(low[:1], *heads, high[:behind], low[:rest]) for heads, behind, rest in padding]
    table = torch.cat([part for row in parts for part in row]).view(len(groups), width)
    last = table.kthvalue(width - most + 1, dim=1, keepdim=True).values
    sums = torch.stack([table > last, table == last]).flatten(1).cumsum(1, dtype=torch.int32)
    ends = np.arange(len(groups))[:, None] * width + counts.cumsum(axis=1)
    limits = to_device(np.stack([ends - counts, ends]), first.device)
    above, ties = sums[:, limits].diff(dim=1)[:, 0]
    earlier = above.sum(1, keepdim=True) + ties.cumsum(1) - ties
    return (above + (to_device(places, first.device)[:, None] - earlier).clamp(min=0).minimum(ties)).double()


def _with_safe(groups: Sequence[Sequence[Tensor]], safe: int) -> list[list[Tensor]]:
    """Raise each head's best `safe` scores above all others."""
    heads = [head for group in groups for head in group]
    width = max(map(len, heads))
    low = heads[0].new_full((width,), -torch.inf)
    table = torch.cat([part for head in heads for part in (head, low[len(head) :])]).view(-1, width)
    table.scatter_(1, table.topk(min(safe, width), sorted=False).indices, torch.inf)
    rows = iter(table)
    return [[next(rows)[: len(head)] for head in group] for group in groups]


def ranked(policy: CompressionPolicy, view: LayerView, scores: Tensor) -> Tensor:
    """Return scores [K, T] fp32 for the selection within each head: reranked, protected tokens first."""
    scores = policy.rerank(view, scores)
    if not (spans := policy.protects(view.logical_len)):
        return scores
    # a block's score is a mean over its tokens: one protected token must outweigh all the others
    factor = _LARGEST_BLOCK if policy.eviction_method.whole_blocks else 1.0
    return lift(scores, within(view, spans), factor)


def within(view: LayerView, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return a mask [K, T] of the tokens with a position in one of the spans."""
    positions = view.signals.positions
    assert positions is not None, f"layer {view.layer}: no positions"
    inside = [(positions >= start) & (positions < end) for start, end in spans]
    return torch.stack(inside).any(dim=0)


def lift(scores: Tensor, chosen: Tensor, factor: float = 1.0) -> Tensor:
    """Raise every chosen token above every other one; both groups keep their order.

    Args:
        scores: [K, T] fp32, finite
        chosen: [K, T] bool
        factor: how many times the span of a head's scores, at least, a token is raised

    Returns: [K, T] fp32. Means and maxima over heads that choose the same tokens keep the order too.
    """
    return torch.where(chosen, scores + lift_step(scores) * factor, scores)


def lift_step(scores: Tensor) -> Tensor:
    """Return slightly more than the span of each head's scores: [K, 1] fp32, > 0 even if all are equal."""
    low, high = scores.aminmax(dim=1, keepdim=True)
    step = (high - low) * (1 + _MARGIN) + torch.maximum(low.abs(), high.abs()) * _MARGIN
    return step.where(step > torch.finfo(step.dtype).tiny, torch.ones_like(step))


def fill(ideal: Tensor, limit: Tensor, total: float, step: Tensor | None = None) -> Tensor:
    """Return counts that add up to a total: ideal plus one common multiple of `step`, each within [0, limit].

    Args:
        ideal, limit:  any one shape, float64; limit >= 0
        total:         the sum; no more than all limits together are given out
        step:          their shape, > 0; None: 1, so that all gain or lose the same

    Returns: their shape, float64; equal to `ideal` where that fits already.
    """
    total = min(total, float(limit.sum()))
    step = torch.ones_like(limit) if step is None else step
    counts = ideal.clamp(min=0.0).minimum(limit)
    if torch.equal(counts, ideal) and abs(float(counts.sum()) - total) < 1e-6:
        return counts
    low, high = -float((ideal / step).max()), float(((limit - ideal) / step).max())
    for _ in range(_STEPS):
        middle = (low + high) / 2
        counts = (ideal + middle * step).clamp(min=0.0).minimum(limit)
        low, high = (middle, high) if float(counts.sum()) < total else (low, middle)
    return counts
