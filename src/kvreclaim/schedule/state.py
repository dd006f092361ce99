"""State shared by the parts of the scheduler: who runs, who waits, and the memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from kvreclaim.memory.kv_memory import KVMemory
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.schedule.queue import Queue, Seq
from kvreclaim.schedule.snapshots import Snapshots
from kvreclaim.schedule.step import Row
from kvreclaim.schedule.step_builder import StepPlanBuilder


@dataclass(slots=True, eq=False)
class State(Generic[Seq]):
    """running: in the order of admission; num_steps: planned so far, the one in the making
    included; clock: prompt tokens processed so far, computed or found."""

    memory: KVMemory
    max_num_seqs: int
    waiting: Queue[Seq]
    snapshots: Snapshots[Seq]
    running: list[Seq] = field(default_factory=list)
    num_steps: int = 0
    clock: int = 0

    def is_parked(self, seq: Seq) -> bool:
        """Whether slots below the pool keep what this sequence's blocks held."""
        return self.memory.offload.parking.is_parked(seq.seq_id)

    def match(self, seq: Seq) -> PrefixMatch:
        """Match the tokens of a waiting sequence that need not be computed."""
        if self.is_parked(seq):
            return self.memory.offload.parking.match_parked(seq.seq_id)
        assert seq.keys is not None, f"sequence {seq.seq_id} was not added"
        limit = seq.hit_limit
        while True:
            match = self.memory.match_prefix(seq.keys, max_tokens=limit)
            limit = seq.footprint.hit_end(match.num_tokens)
            if limit == match.num_tokens:
                return match

    def num_cached(self, seq: Seq) -> int:
        """Leading tokens that need not be computed of one that waits."""
        if self.is_parked(seq):
            return seq.num_computed
        if not seq.num_computed and (snapshot := self.snapshots.find(seq)) is not None:
            return snapshot.num_computed
        return self.match(seq).num_tokens

    def must_wait(self, seq: Seq) -> bool:
        """Whether one that waits is to go on waiting for what is being read from disk for it."""
        if not seq.num_computed:
            if self.snapshots.must_wait(seq):
                return True
            if self.snapshots.has_missed(seq):
                self.prefetch(seq)
        return self.memory.offload.must_wait(seq.seq_id)

    def end_loading(self, seq: Seq) -> None:
        """It has begun, or is gone: what comes from disk for it is others'."""
        self.snapshots.leave(seq.seq_id)
        self.memory.offload.end_loading(seq.seq_id)

    def prefetch(self, seq: Seq) -> None:
        """Begin to read from disk what one that waits would hit there."""
        assert seq.keys is not None, f"sequence {seq.seq_id} was not added"
        self.memory.offload.end_loading(seq.seq_id)
        self.memory.offload.prefetch(seq.seq_id, seq.keys, seq.hit_limit)

    def compute(self, seq: Seq, num_tokens: int, step: StepPlanBuilder[Seq]) -> None:
        """Have a sequence compute its next tokens; there is room for them."""
        num_drafts = max(0, num_tokens - seq.num_uncomputed)
        row = Row(seq.seq_id, seq.num_computed, num_tokens, seq.is_exact, num_drafts)
        step.add(seq, row, self.memory.grow(seq.seq_id, num_tokens))

    def fail(self, seq: Seq, step: StepPlanBuilder[Seq], error: Exception) -> None:
        """Keep a sequence out of this step and of the queue; the caller ends its request."""
        step.lose(seq.seq_id)
        step.failed.append((seq.seq_id, error))
        self.waiting.remove(seq)
