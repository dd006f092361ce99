"""Signals that need an additional forward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvreclaim.compression.policy import Signal
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.signals.store import ByteBudget
from kvreclaim.model.capture import capture_queries, read_again
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_source import KeySource
from kvreclaim.ops.states import StateStep


class ExtraPasses:
    """Results of extra passes for each layer, kept until the sequence is dropped.

    states: for recurrent layers: sequence id -> a pass from its state that stores no state
    """

    def __init__(
        self,
        loaded: LoadedModel,
        facts: ModelFacts,
        room: ByteBudget,
        states: Callable[[int], StateStep] | None,
    ) -> None:
        self.loaded, self.facts, self._room, self._states = loaded, facts, room, states
        self.kept: dict[int, dict[Signal, list[Tensor]]] = {}

    def future_queries(self, seq: Sequence) -> list[Tensor]:
        """[H, T - 1, D] of the whole text under full attention, in the model's dtype. The last token is never
        computed, so it has no query."""
        kept = self.kept.setdefault(seq.seq_id, {})
        if Signal.FUTURE_QUERIES not in kept:
            found: list[Tensor] = []
            dtype = self.loaded.facts.dtype
            capture_queries(
                self.loaded,
                [seq.token_ids[:-1]],
                lambda _, queries: found.append(queries.to(dtype)),
                rotated=True,
            )
            kept[Signal.FUTURE_QUERIES] = self._counted([found[layer] for layer in self.facts.ids])
        return kept[Signal.FUTURE_QUERIES]

    def read_again(self, seq: Sequence, source: Callable[[int], KeySource]) -> list[Tensor]:
        """[K, T] fp32 (capture.read_again). source: layer -> the sequence's keys and values"""
        kept = self.kept.setdefault(seq.seq_id, {})
        if Signal.READ_AGAIN not in kept:
            context = seq.token_ids[: seq.num_computed]
            states = None if self._states is None else self._states(seq.seq_id)
            found = read_again(self.loaded, context, lambda layer: source(layer).tensors(), states)
            kept[Signal.READ_AGAIN] = self._counted(found)
        return kept[Signal.READ_AGAIN]

    def _counted(self, found: list[Tensor]) -> list[Tensor]:
        self._room.change(0, sum(tensor.nbytes for tensor in found))
        return found

    def drop(self, seq_id: int) -> None:
        dropped = self.kept.pop(seq_id, {}).values()
        self._room.change(sum(tensor.nbytes for found in dropped for tensor in found), 0)
