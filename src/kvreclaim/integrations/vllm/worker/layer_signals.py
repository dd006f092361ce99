"""Signals that hooks on vLLM's layers keep for policies: recent queries of each request, scores of each slot.

All requests are watched, whatever their own compression: a request that hits another's blocks reads their
scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.compressor import Compressor, SignalSource
from kvreclaim.compression.kvzap import token_scores
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.compression.stats import LayerStats
from kvreclaim.engine.signals.slot_scores import ScorePlanes
from kvreclaim.engine.signals.store import ByteBudget, QueryStore, StepQueries
from kvreclaim.ops.facts import ModelFacts


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """Tokens of a step, in the order of its rows.

    chunks: (request, position of its first token, tokens) of each
    slots:  [T] int64, read when the layers are run
    """

    chunks: Sequence[tuple[str, int, int]]
    slots: Tensor


class KeptSignals:
    """Signals of the layers for policies, of this worker's heads.

    Args:
        facts:  of the layers
        window: queries kept of each request; 0: none
        stats:  weights of hidden states, of each layer; read only with scores
        scores: of all slots; None: not kept
    """

    def __init__(
        self,
        facts: ModelFacts,
        window: int,
        stats: tuple[LayerStats, ...] | None = None,
        scores: ScorePlanes | None = None,
    ) -> None:
        self.queries = QueryStore(window, facts, ByteBudget()) if window else None
        self.stats, self.scores = stats, scores
        self._heads = facts.layers[0].num_heads, facts.layers[0].head_dim
        self._slots: Tensor | None = None
        self._step: StepQueries | None = None

    def begin(self, step: StepTokens) -> None:
        """Begin a step: following calls are of its tokens."""
        self._slots = step.slots
        if self.queries is None:
            return
        chunks, row = [], 0
        for request_id, first, count in step.chunks:
            chunks.append((request_id, first, count, row))
            row += count
        self._step = self.queries.of_step(chunks)

    def see_queries(self, layer: int, queries: Tensor) -> None:
        """queries: [>= T, H * D] or [>= T, H, D], rotated."""
        assert self._step is not None, f"layer {layer}: queries outside of a step"
        rows = queries.unflatten(-1, self._heads) if queries.ndim == 2 else queries
        self._step.write(slice(layer, layer + 1), rows[None])

    def see_hidden(self, layer: int, hidden: Tensor) -> None:
        """hidden: [>= T, M], what the layer was given."""
        assert self._slots is not None, f"layer {layer}: hidden states outside of a step"
        assert self.stats is not None, "needed by a policy with weights"
        assert self.scores is not None, "needed by a policy that reads scores"
        rows = hidden[: len(self._slots)]
        self.scores.write(layer, self._slots, token_scores(rows, self.stats[layer]))

    def source(
        self, compressor: Compressor, request_id: str, end: int, blocks: Tensor, num_tokens: int
    ) -> SignalSource:
        """Return layer -> the policy's signals for the first num_tokens slots of these blocks, in all heads;
        queries before position `end`."""
        policy = compressor.policy

        def of(layer: int) -> LayerSignals:
            queries, scores = None, None
            if Signal.RECENT_QUERIES in policy.needs:
                assert self.queries is not None, "kept for a policy that needs queries"
                queries = self.queries.last(request_id, layer, end)[:, -policy.query_window :]
            if Signal.TOKEN_SCORES in policy.needs:
                assert self.scores is not None, "kept for a policy that needs scores"
                scores = self.scores.of(layer, blocks, num_tokens)
            return LayerSignals(queries=queries, token_scores=scores)

        return of

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or start anew. Scores belong to slots, not to requests."""
        if self.queries is not None:
            for request_id in request_ids:
                self.queries.drop(request_id)
