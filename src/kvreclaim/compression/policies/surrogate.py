"""A learned score of cached keys, values and ages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal
from kvreclaim.compression.surrogate import KNOTS, age_scores, num_features
from kvreclaim.ops.head_rows import spread
from kvreclaim.ops.key_source import surrogate_scores

GRAIN = 2**-8
"""Nats; a difference below it says nothing."""


@dataclass(frozen=True)
class Surrogate(CompressionPolicy):
    """Ranks tokens by a score that calibration learned from repeated documents:

        score = w . features(k, v) + r(age)

    It estimates the logarithm of the token's largest attention weight for later queries, of the continuation
    or of a question. Scores are comparable between layers and heads, so let heads compete: shares(surrogate).
    With equal heads it is much weaker. Scores are whole GRAINs: the same token at two positions has nearly
    the same key, at least in the first layer, and rounding must not decide which one stays.

    Source: ours; the target combines KVzip's, arXiv 2505.23416, with the continuation's attention.

    Cost: reads keys and values once. State: logical positions of the slots.
    """

    name = "surrogate"
    needs = frozenset({Signal.SURROGATE, Signal.POSITIONS})
    any_heads = True
    any_layers = True

    def score(self, view: LayerView) -> Tensor:
        return self.score_many([view])[0]

    def score_many(self, views: Sequence[LayerView]) -> list[Tensor]:
        alike: dict[object, list[int]] = {}
        for i, view in enumerate(views):
            layout = view.facts.rope
            shape = None if layout is None else (layout.style, layout.start, layout.num_bands)
            alike.setdefault(shape, []).append(i)
        found: dict[int, Tensor] = {}
        for places in alike.values():
            group = [views[i] for i in places]
            scores = surrogate_scores([view.source for view in group], _weights(group), group[0].facts.rope)
            found.update(zip(places, _aged(group, scores), strict=True))
        return [found[i] for i in range(len(views))]


def _aged(views: Sequence[LayerView], scores: Sequence[Tensor]) -> list[Tensor]:
    """Add the score of the tokens' ages to each [K, T], in whole GRAINs."""
    flat = torch.cat([rows.flatten() for rows in scores])
    heads = np.array([len(rows) for rows in scores])
    lengths = np.array([rows.shape[1] for rows in scores]).repeat(heads)
    now = np.array([view.logical_len for view in views]).repeat(heads)
    positions = torch.cat([_positions(view).expand(view.source.shape).flatten() for view in views])
    table = age_scores(torch.cat([_stats(view)[1] for view in views]))
    ages = spread(now, lengths, flat.device).sub_(positions.to(flat.device))
    first = np.arange(len(lengths)) * table.shape[1] - KNOTS[0]
    places = ages.clamp_(KNOTS[0], KNOTS[-1]).add_(spread(first, lengths, flat.device))
    flat += table.flatten().index_select(0, places)
    flat.div_(GRAIN).round_().mul_(GRAIN)
    return [
        part.view_as(rows) for part, rows in zip(flat.split([x.numel() for x in scores]), scores, strict=True)
    ]


def _positions(view: LayerView) -> Tensor:
    """Return logical positions [K | 1, T] int32."""
    assert view.signals.positions is not None, f"layer {view.layer}: no positions"
    return view.signals.positions


def _stats(view: LayerView) -> tuple[Tensor, Tensor]:
    """Return weights [K, P] and [K, A]."""
    assert view.stats is not None, "needs has SURROGATE"
    weights, age = view.stats.surrogate, view.stats.surrogate_age
    assert weights is not None, "refusals.layer_stats has checked it"
    assert age is not None, "is there wherever weights are"
    return weights, age


def _weights(views: Sequence[LayerView]) -> list[Tensor]:
    """Return weights [K, P] of each view; views with the same statistics share a tensor."""
    rows: dict[int, Tensor] = {}
    for view in views:
        rows.setdefault(id(view.stats), _stats(view)[0][:, : num_features(view.facts)])
    return [rows[id(view.stats)] for view in views]
