"""A learned score of cached keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal
from kvreclaim.compression.surrogate import features


@dataclass(frozen=True)
class Surrogate(CompressionPolicy):
    """Ranks tokens by what calibration has learnt from a document said twice:

        score = w . features(k, v)

    about the logarithm of the most attention that a later query will pay the token. It means the same in all
    layers and heads, so let them compete: shares(surrogate). With equal heads it loses most of its worth.

    Source: ours; the target is KVzip's, arXiv 2505.23416.

    Cost: reads keys and values once; nothing is kept beside the cache.
    """

    name = "surrogate"
    needs = frozenset({Signal.SURROGATE})

    def score(self, view: LayerView) -> Tensor:
        assert view.stats is not None, "needs has SURROGATE"
        assert view.stats.surrogate is not None, "refusals.layer_stats has checked it"
        found = features(*view.source.tensors(), view.facts.rope)
        weights = view.stats.surrogate[:, : found.shape[-1], None]
        return (found @ weights)[..., 0]
