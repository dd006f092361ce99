"""Query mixture: several query centres per head, rotated to future positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvreclaim.checks import check_offsets
from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal
from kvreclaim.ops.key_source import value_norms
from kvreclaim.ops.scoring import collapsed_mixture, offset_phases, summed_mixture, turned_queries
from kvreclaim.options import option


@dataclass(frozen=True)
class QueryMixture(CompressionPolicy):
    """Ranks a key by its largest expected attention over kinds of queries.

        l_{c,d}(j) = s Re sum_f mu_{c,f} e^{i w_f (L + d)} conj(K_{j,f}) + s^2/2 sum_f v_{c,f} |K_{j,f}|^2
        S(j) = ||v_j|| max_c mean_d softmax_j l_{c,d}(j)

    with centre mu_c and variance v_c per real dim of each cluster of queries before rotation, and s the
    softmax scale over a temperature; then the maximum over the query heads of a KV head. Dims without
    position are plain products. The maximum over centres, not their weighted sum: rare kinds of queries
    are the ones that look far back. Ours, not published; arXiv 2604.04921 is the case of one centre.
    docs/evidence.md explains it and gives measurements.

    offsets:     future distances d, tokens; these five lose nothing against 2^0 ... 2^16, one loses
    value_norm:  multiply by ||v||: a token contributes its weight times its value
    normalise:   softmax over "all" live tokens or over the "candidates" alone; other tokens then score 0
    form:        "expected" as above; "collapsed": the logits averaged over the offsets first, which makes one
                 product per centre, then z-scores over the candidates instead of the softmax, moved to start
                 at 0; "sum": centres summed by their weight instead of the maximum (an ablation)
    temperature: > 0; the model's softmax scale is divided by it. Above 1 a centre's favourites count for
                 less and its second choices for more; 4 was the best on all checkpoints tried
    Cost: C x offsets products of [G, D] by [D, T] per KV head; state: the statistics with centres. Centres
    that the group's query heads share cost 1 / G of that. The other forms run on a copy of the keys.
    """

    offsets: tuple[int, ...] = (1, 16, 256, 4096, 65536)
    value_norm: bool = option(True)
    normalise: Literal["candidates", "all"] = option("all")
    form: Literal["expected", "collapsed", "sum"] = option("expected")
    temperature: float = option(4.0, low=1e-3, high=1e6)
    name = "query_mixture"
    any_layers = True
    needs = frozenset({Signal.QUERY_STATS, Signal.QUERY_CENTERS})

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", check_offsets("query_mixture option 'offsets'", self.offsets))
        super().__post_init__()

    def score(self, view: LayerView) -> Tensor:
        return self.score_many([view])[0]

    def score_many(self, views: Sequence[LayerView]) -> list[Tensor]:
        scores = [self._mixture(*each) for each in zip(views, self._centers(views), strict=True)]
        if not self.value_norm:
            return scores
        norms = value_norms([view.source for view in views])
        return [score * norm for score, norm in zip(scores, norms, strict=True)]

    def _centers(self, views: Sequence[LayerView]) -> Tensor:
        """Return centres [views, H, C, O, D], rotated to the offsets from each sequence's next position."""
        view = views[0]
        assert view.stats is not None, f"layer {view.layer}: no query statistics"
        assert view.stats.centers is not None, f"layer {view.layer}: no centres"
        assert view.facts.rope is not None, f"layer {view.layer}: no verified rotation"
        turns = offset_phases([each.logical_len for each in views], self.offsets, view.facts.rope)
        if self.form == "collapsed":
            turns = turns.mean(dim=1, keepdim=True)
        return turned_queries(view.stats.centers, turns[:, None, None], view.facts.rope)

    def _mixture(self, view: LayerView, centers: Tensor) -> Tensor:
        assert view.stats is not None, f"layer {view.layer}: no query statistics"
        assert view.stats.center_var is not None, f"layer {view.layer}: no centre variances"
        assert view.stats.center_weight is not None, f"layer {view.layer}: no centre weights"
        over = slice(None) if self.normalise == "all" else view.candidates
        variances, scale = view.stats.center_var, view.facts.softmax.scale / self.temperature
        if self.form == "expected":
            return view.source.mixture_scores(centers, variances, scale, over)
        if self.form == "sum":
            return summed_mixture(view.keys, centers, variances, view.stats.center_weight, scale, over)
        return collapsed_mixture(view.keys, centers[:, :, 0], variances, scale, over)
