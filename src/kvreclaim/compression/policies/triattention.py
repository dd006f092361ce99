"""TriAttention: one mean query per head, rotated to future positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode, Signal
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.key_source import KeySource
from kvreclaim.ops.rope import RopeLayout, to_bands
from kvreclaim.ops.scoring import group_z_scores, offset_phases, turned_queries
from kvreclaim.options import option

OFFSETS = tuple(2**n for n in range(17))
Aggregate = Literal["mean", "max"]


@dataclass(frozen=True)
class TriAttention(CompressionPolicy):
    """Ranks a key by the attention of the head's mean query at future distances.

        S(K) = mean_d Re sum_f c_f e^{i w_f (L + d)} conj(K_f) + sum_f (a_f - |c_f|) |K_f|

    with c_f = E[q_f], a_f = E|q_f| before rotation and d = 2^0 ... 2^16; then a z-score over the
    candidates per query head and the maximum over the query heads of a KV head. Dims without
    position are plain products with the mean query.

    Paper: arXiv 2604.04921.

    aggregate: over the offsets; "mean" as published, which collapses to one product per head
    use_trig:  False leaves the norm term alone (ablation)
    use_norm:  False leaves the trigonometric term alone (ablation)
    Cost: two products of [G, D] by [D, T] per KV head ("max": 17 + 1); state: the statistics.
    """

    aggregate: Aggregate = option("mean")
    use_trig: bool = option(True)
    use_norm: bool = option(True)
    name = "triattention"
    any_layers = True
    needs = frozenset({Signal.QUERY_STATS})
    default_mode = Mode.PER_HEAD

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.use_trig or self.use_norm):
            raise InvalidArgumentError(
                "triattention options 'use_trig' and 'use_norm' are both false; leave at least one true."
            )

    def score(self, view: LayerView) -> Tensor:
        return self.score_many([view])[0]

    def score_many(self, views: Sequence[LayerView]) -> list[Tensor]:
        stats, layout = views[0].stats, views[0].facts.rope
        assert stats is not None, f"layer {views[0].layer}: no query statistics"
        assert layout is not None, f"layer {views[0].layer}: no verified rotation"
        query = HeadQueries(stats.q_mean, stats.q_abs_mean, layout)
        scores = query.scores([(view.source, view.logical_len) for view in views], self)
        return group_z_scores(scores, [view.candidates for view in views], views[0].source.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class HeadQueries:
    """Statistics of a layer's queries: mean [H, D], abs_mean [H, >= F]."""

    mean: Tensor
    abs_mean: Tensor
    layout: RopeLayout

    def scores(self, places: Sequence[tuple[KeySource, int]], policy: TriAttention) -> list[Tensor]:
        """Return [H, T] scores before the z-score, of keys at a logical length. Phases are averaged over the
        offsets first, which leaves one product per head."""
        turns = offset_phases([logical_len for _, logical_len in places], OFFSETS, self.layout)
        if policy.aggregate == "mean":
            turns = turns.mean(dim=1, keepdim=True)
        turns = turns if policy.use_trig else turns[:, :0]
        queries = turned_queries(self.mean, turns[:, None], self.layout)
        spread = None
        if policy.use_norm:
            spread = self.abs_mean[:, : self.layout.num_bands] - to_bands(self.mean, self.layout).abs()
        return [
            source.trig_norm_scores(own, spread, self.layout)
            for (source, _), own in zip(places, queries, strict=True)
        ]
