"""Share of a text that each KV head needs. Calibration measures it once and stores it in the statistics.

The split of memory between heads matters more than the choice of tokens within a head. Without a known
question, a retrieval head needs nearly all tokens, and most others need sinks and recent tokens. The share
is a property of the model rather than of the text, so it can be measured beforehand, on repeated documents
(surrogate.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts

FRACTIONS = (0.4, 0.2, 0.1, 0.05)
"""Fractions of the text that all heads keep together, for which the shares are measured."""


class SharesFit:
    """Mean shares over documents. One threshold over all layers and heads keeps a fraction of a document's
    tokens; a head's share is the fraction of its tokens above it."""

    def __init__(self, facts: ModelFacts) -> None:
        self._shape = (facts.num_layers, facts.layers[0].num_kv_heads)
        self._reached: dict[int, dict[int, Tensor]] = {}
        self._sums = torch.zeros(*self._shape, len(FRACTIONS), dtype=torch.float64)
        self._documents = 0

    def add(self, layer: int, document: int, reached: Tensor) -> None:
        """Add one layer of a document, in any order. Its scores are held until all layers have been added.

        reached: [K, T] largest attention weight of each token for a later query
        """
        held = self._reached.setdefault(document, {})
        assert layer not in held, f"layer {layer} of document {document} was added twice"
        held[layer] = reached.cpu()
        if len(held) < self._shape[0]:
            return
        del self._reached[document]
        scores = torch.stack([held[n] for n in range(self._shape[0])]).flatten(0, 1)
        heads, tokens = scores.shape
        owner = scores.flatten().argsort(descending=True, stable=True) // tokens
        for i, fraction in enumerate(FRACTIONS):
            best = owner[: round(fraction * heads * tokens)]
            self._sums[..., i] += torch.bincount(best, minlength=heads).view(self._shape) / tokens
        self._documents += 1

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was added."""
        return not (self._reached or self._documents)

    def build(self) -> Tensor:
        """Return [L, K, S] fp32 shares at FRACTIONS, 0 to 1. Raises: InvalidArgumentError if empty."""
        if self._reached or not self._documents:
            raise InvalidArgumentError(
                "shares of heads are the mean over whole documents; add every layer of one."
            )
        return (self._sums / self._documents).float()


def share_at(shares: Tensor, fractions: Sequence[float], fraction: float) -> Tensor:
    """Interpolate the heads' shares at `fraction` of a text kept.

    Linear in the logarithm of the fraction between two measured fractions, and from the largest up to 1,
    where everything is kept. Proportional to the fraction below the smallest.

    Args:
        shares:    [..., S] at `fractions`, which fall
        fraction:  > 0

    Returns: [...] float64, 0 to 1.
    """
    knots = (1.0, *fractions)
    values = torch.cat([torch.ones_like(shares[..., :1]), shares], dim=-1).double()
    if fraction <= knots[-1]:
        return values[..., -1] * (fraction / knots[-1])
    fraction = min(fraction, 1.0)
    above = max(i for i, knot in enumerate(knots) if knot >= fraction)
    weight = math.log(knots[above] / fraction) / math.log(knots[above] / knots[above + 1])
    return torch.lerp(values[..., above], values[..., above + 1], weight)
