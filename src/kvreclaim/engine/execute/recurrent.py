"""The states of recurrent layers next to the paged cache: used by steps, kept while parked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from kvreclaim.engine.extension import AttentionHook, Extension
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.model.recurrent import RecurrentLayers
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.states import StateRun, StateStep, StateStore
from kvreclaim.schedule.step import Admitted


class RecurrentStates(Extension):
    """Passes the slots that a step reads and writes to the recurrent layers. Slots written by a failed step
    are never read."""

    rank = 5

    def __init__(self, layers: RecurrentLayers, store: StateStore, group: RecurrentGroup) -> None:
        self.layers, self.store, self.group = layers, store, group
        self._parked: dict[int, list[Tensor]] = {}

    def attend(self, runs: list[Scheduled], batch: AttentionBatch | None) -> tuple[AttentionHook, ...]:
        start, found = 0, list[StateRun]()
        for run in runs:
            seq_id, row = run.seq.seq_id, run.row
            writes = self.group.pending(seq_id)[: 1 + row.num_drafts]
            found.append(StateRun(start, row.num_tokens, self.group.slot(seq_id), writes))
            start += row.num_tokens
        self.layers.begin(StateStep(self.store, found))
        return ()

    def behind(self, seq_id: int) -> StateStep:
        """Return a pass from a sequence's state that stores no state."""
        slot = self.group.slot(seq_id)
        assert slot is not None, f"sequence {seq_id} has computed nothing"
        return StateStep.behind(self.store, slot)

    @contextmanager
    def drafting(self, step: list[Scheduled]) -> Iterator[None]:
        """Run a pass over one token per companion. It alternates between the slots lent to each target."""
        runs = []
        for place, item in enumerate(step):
            seq_id, depth = item.seq.seq_id, item.row.first - item.seq.num_computed
            lent = self.group.pending(seq_id)
            before = lent[(depth - 1) % 2] if depth else self.group.slot(seq_id)
            runs.append(StateRun(place, 1, before, [lent[depth % 2]]))
        with self.layers.stepping(StateStep(self.store, runs)):
            yield

    def attended(self, step: list[Scheduled]) -> None:
        self.layers.end()

    def abandoned(self) -> None:
        self.layers.end()

    def preempted(self, seq: Sequence, *, parked: bool) -> None:
        if (slot := self.group.leaving(seq.seq_id)) is not None:
            self._parked[seq.seq_id] = self.store.save(slot)
            self.group.saved(seq.seq_id)

    def admitted(self, seq: Sequence, begun: Admitted) -> None:
        if (slot := self.group.coming(seq.seq_id)) is not None:
            self.store.load(slot, self._parked.pop(seq.seq_id))
            self.group.loaded(seq.seq_id)

    def lost(self, seq: Sequence) -> None:
        self._parked.pop(seq.seq_id, None)

    def reset(self, seq_id: int) -> None:
        self._parked.pop(seq_id, None)

    def released(self, seq_id: int) -> None:
        self._parked.pop(seq_id, None)

    def describe(self) -> str:
        sizes = self.group.sizes
        return (
            f"{sizes.num_slots} states of recurrent layers, {sizes.num_checkpoints} of them for prefix hits"
        )
