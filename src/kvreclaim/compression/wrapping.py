"""What wrappers share: what they refuse to wrap, how they put tokens before others, how they fill counts."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.way import Way

_MARGIN = 2.0**-10
_STEPS = 100


class Trait(StrEnum):
    """What may make a policy unfit to be wrapped."""

    KEEPS_ALL = "keeps everything, so that there is nothing to rank"
    UNMOVED = "moves nothing"
    WHOLE_BLOCKS = "evicts whole blocks, not tokens"
    UNEVEN = "lets heads keep unequal numbers of tokens"
    CACHE_RELATIVE = "takes a token's slot for its position"


def traits(policy: CompressionPolicy) -> frozenset[Trait]:
    """Those that the policy has."""
    found = {
        Trait.KEEPS_ALL: not policy.way.evicts,
        Trait.WHOLE_BLOCKS: policy.way is Way.BLOCKS,
        Trait.UNMOVED: policy.way is Way.MASK,
        Trait.UNEVEN: policy.way is Way.CELLS,
        Trait.CACHE_RELATIVE: policy.cache_relative,
    }
    return frozenset(trait for trait, has in found.items() if has)


def refuse(outer: str, inner: CompressionPolicy, unfit: Collection[Trait], remedy: str) -> None:
    """Raises InvalidArgumentError if the inner policy has one of these traits; remedy says what to write."""
    for trait in sorted(traits(inner) & set(unfit)):
        raise InvalidArgumentError(f"{outer}({inner.name}) is refused: {inner.name} {trait}; {remedy}.")


def lift(scores: Tensor, chosen: Tensor, factor: float = 1.0) -> Tensor:
    """The scores, with every chosen token above every other one and both groups in their old order.

    Args:
        scores: [K, T] fp32, finite
        chosen: [K, T] bool
        factor: how many times the span of a head's scores, at least, a token is raised

    Returns: [K, T] fp32. Means and maxima over heads that choose the same tokens keep the order too.
    """
    return torch.where(chosen, scores + lift_step(scores) * factor, scores)


def lift_step(scores: Tensor) -> Tensor:
    """A little more than the span of each head's scores: [K, 1] fp32, > 0 also where all are equal."""
    low, high = scores.aminmax(dim=1, keepdim=True)
    step = (high - low) * (1 + _MARGIN) + torch.maximum(low.abs(), high.abs()) * _MARGIN
    return step.where(step > torch.finfo(step.dtype).tiny, torch.ones_like(step))


def fill(wanted: Tensor, limit: Tensor, total: float) -> Tensor:
    """Shares that add up to a total: wanted plus one common amount, each within [0, limit].

    Args:
        wanted, limit: any one shape, float64; limit >= 0
        total:         the sum; no more than all limits together are given out

    Returns: their shape, float64; equal to `wanted` where that fits already.
    """
    total = min(total, float(limit.sum()))
    shares = wanted.clamp(min=0.0).minimum(limit)
    if torch.equal(shares, wanted) and abs(float(shares.sum()) - total) < 1e-6:
        return shares
    low, high = -float(wanted.max()), float((limit - wanted).max())
    for _ in range(_STEPS):
        middle = (low + high) / 2
        shares = (wanted + middle).clamp(min=0.0).minimum(limit)
        low, high = (middle, high) if float(shares.sum()) < total else (low, middle)
    return shares
