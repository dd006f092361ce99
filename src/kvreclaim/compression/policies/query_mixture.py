"""Query mixture: several centres per head, each turned to future positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvreclaim.checks import check_bool, check_choice, check_offsets
from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode, Signal
from kvreclaim.ops.scoring import offset_phases, turned_queries


@dataclass(frozen=True)
class QueryMixture(CompressionPolicy):
    """Ranks a key by the attention it expects from the kind of query that wants it most.

        l_{c,d}(j) = s Re sum_f mu_{c,f} e^{i w_f (L + d)} conj(K_{j,f}) + s^2/2 sum_f v_{c,f} |K_{j,f}|^2
        S(j) = max_c mean_d softmax_j l_{c,d}(j)

    with centre mu_c and variance v_c per real dim of each cluster of queries before rotation and the
    softmax scale s; then the maximum over the query heads of a KV head. Dims without position are
    plain products. The maximum over centres, not their weighted sum: rare kinds of queries are the
    ones that look far back. Ours, not published; arXiv 2604.04921 is the case of one centre.

    offsets:    future distances d, tokens; these five lose nothing against 2^0 ... 2^16, one loses
    value_norm: multiply by ||v||; helps on some checkpoints and hurts on others, so off
    normalise:  softmax over "all" live tokens or over the "candidates" alone, whose others score 0
    Cost: C x offsets products of [G, D] by [D, T] per KV head; state: the statistics with centres.
    """

    offsets: tuple[int, ...] = (1, 16, 256, 4096, 65536)
    value_norm: bool = False
    normalise: Literal["candidates", "all"] = "all"
    name = "query_mixture"
    needs = frozenset({Signal.QUERY_STATS, Signal.QUERY_CENTERS})
    default_mode = Mode.PER_LAYER_HEAD

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", check_offsets("query_mixture option 'offsets'", self.offsets))
        check_bool("query_mixture option 'value_norm'", self.value_norm)
        check_choice("query_mixture option 'normalise'", self.normalise, ("candidates", "all"))

    def score(self, view: LayerView) -> Tensor:
        assert view.stats is not None, f"layer {view.layer}: no query statistics"
        assert view.stats.centers is not None, f"layer {view.layer}: no centres"
        assert view.stats.center_var is not None, f"layer {view.layer}: no centre variances"
        assert view.facts.rope is not None, f"layer {view.layer}: no verified rotation"
        turns = offset_phases(view.logical_len, self.offsets, view.facts.rope)
        centers = turned_queries(view.stats.centers, turns, view.facts.rope)
        over = slice(None) if self.normalise == "all" else view.candidates
        scores = view.source.mixture_scores(centers, view.stats.center_var, view.facts.scale, over)
        return scores * view.source.value_norms() if self.value_norm else scores
