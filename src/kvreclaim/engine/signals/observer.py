"""Observers of a step's attention calls, and their writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.kvzap import token_scores
from kvreclaim.engine.signals.late import LateSignals
from kvreclaim.engine.signals.slot_scores import SlotScores
from kvreclaim.engine.signals.store import MassStore
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.kv_cache import KVCache

Write = Callable[[AttentionCall], None]
QueryWrite = Callable[[slice, Tensor], None]
"""Is given consecutive layers and their queries [layers, T, H, D] of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Observer:
    """Sees the attention calls of one step, after their keys have been written.

    queries: hooks that need nothing but queries, which a replayed step hands out when it is over
    commit:  to be called when all layers have been computed. Queries and scores are written as they come, to
             places that are written again if the step is; sums of attention wait for this
    late:    of rows with drafts: to be recorded when it is known which of them stand
    """

    writes: tuple[Write, ...]
    queries: tuple[QueryWrite, ...] = ()
    commit: Callable[[], None] = lambda: None
    late: LateSignals | None = None

    def see(self, call: AttentionCall) -> None:
        """Take in one layer."""
        for write in self.writes:
            write(call)
        for write_queries in self.queries:
            write_queries(slice(call.layer, call.layer + 1), call.q[None])

    def see_queries(self, queries: Tensor) -> None:
        """Take in all layers at once, of a step that needs no other hook: queries [L, T, H, D]."""
        assert not self.writes, "some hooks need more than queries"
        for write_queries in self.queries:
            write_queries(slice(None), queries)


@dataclass(frozen=True, slots=True, eq=False)
class StepMass:
    """Sums the attention of a step's queries; `commit` stores the sums. members: [n] the sequences' rows of
    queries; None: all rows."""

    store: MassStore
    rows: Tensor
    batch: AttentionBatch
    members: Tensor | None
    _found: list[tuple[int, Tensor]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, store: MassStore, seq_ids: list[int], places: list[int], batch: AttentionBatch
    ) -> StepMass:
        """Take rows for sequences at these places in the batch."""
        for seq_id in seq_ids:
            store.take(seq_id)
        rows, members = store.index(seq_ids), None
        if len(places) < len(batch.sequences):
            members, batch = batch.rows_of(places), batch.part(places)
        store.reserve(max(seq.seq_len for seq in batch.sequences))
        return cls(store, rows, batch, members)

    def see(self, cache: KVCache, backend: Backend) -> QueryWrite:
        """Return the hook that sums what queries attend to in this cache."""

        def write(layers: slice, queries: Tensor) -> None:
            queries = queries if self.members is None else queries[:, self.members]
            for layer, own in zip(range(len(cache.layers))[layers], queries, strict=True):
                self._found.append((layer, backend.column_sums(own, cache.layers[layer], self.batch)))

        return write

    def commit(self) -> None:
        for layer, sums in self._found:
            self.store.add(self.rows, layer, sums)


def score_write(
    store: SlotScores | None, compressor: Compressor, members: list[int], batch: AttentionBatch
) -> Write:
    """Return a hook that scores the tokens of a step's sequences and stores the scores by slot."""
    rows = batch.rows_of(members) if len(members) < len(batch.sequences) else slice(None)
    stats, slots = compressor.stats, batch.slot_mapping[rows]
    assert store is not None, "Signals.check has made it"
    assert stats is not None, "needs has TOKEN_SCORES"

    def write(call: AttentionCall) -> None:
        assert call.hidden is not None, f"layer {call.layer} hands out nothing; the probe saw it do so"
        store.write(call.layer, slots, token_scores(call.hidden[rows], stats[call.layer]))

    return write


def as_last(slots: SequenceSlots, num_rows: int) -> SequenceSlots:
    """Return the sequence after num_rows rows of a step, with the last of them as its only query."""
    return replace(slots, query_len=1, seq_len=slots.seq_len - slots.query_len + num_rows)
