"""A learned score of cached keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal
from kvreclaim.compression.surrogate import num_features
from kvreclaim.ops.key_source import surrogate_scores

GRAIN = 2**-8
"""Nats; a difference below it says nothing."""


@dataclass(frozen=True)
class Surrogate(CompressionPolicy):
    """Ranks tokens by what calibration has learnt from a document said twice:

        score = w . features(k, v)

    about the logarithm of the most attention that a later query will pay the token. It means the same in all
    layers and heads, so let them compete: shares(surrogate). With equal heads it loses most of its worth.
    Scores are whole GRAINs: the same token at two places has the same key but for rotation's rounding, at
    least in the first layer, and which of the two stays must not hang on its last bit.

    Source: ours; the target is KVzip's, arXiv 2505.23416.

    Cost: reads keys and values once; nothing is kept beside the cache.
    """

    name = "surrogate"
    needs = frozenset({Signal.SURROGATE})
    any_heads = True

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
            whole = ((rows / GRAIN).round_().mul_(GRAIN) for rows in scores)
            found.update(zip(places, whole, strict=True))
        return [found[i] for i in range(len(views))]


def _weights(views: Sequence[LayerView]) -> list[Tensor]:
    """[K, P] of each; the same tensor for views with the same statistics."""
    rows: dict[int, Tensor] = {}
    for view in views:
        assert view.stats is not None, "needs has SURROGATE"
        assert view.stats.surrogate is not None, "refusals.layer_stats has checked it"
        rows.setdefault(id(view.stats), view.stats.surrogate[:, : num_features(view.facts)])
    return [rows[id(view.stats)] for view in views]
