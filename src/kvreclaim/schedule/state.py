"""State shared by the parts of the scheduler: running and waiting sequences, memory, and the current step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from kvreclaim.memory.changes import Growth
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.schedule.fair_share import FairShare, PromptTokens
from kvreclaim.schedule.queue import Queue, Seq, Tenant
from kvreclaim.schedule.sequence import Status
from kvreclaim.schedule.snapshots import Snapshots
from kvreclaim.schedule.step import Admitted, Preempted, Row, StepPlan


@dataclass(slots=True, eq=False)
class StepPlanBuilder(Generic[Seq]):
    """An unfinished step plan.

    budget:  tokens that may still be added
    shares:  of the tenants, if there are several; tokens: of their prompts, after decodes
    lost:    ids of sequences that have been preempted or failed
    pressed: running sequences lack blocks, so no sequence starts
    deferred: ids of sequences that wait for loading or computation
    skipped: tenants out of turn; refused: their sequences that found no room
    """

    budget: int
    shares: FairShare[Seq] | None = None
    tokens: PromptTokens | None = None
    rows: dict[int, tuple[Row, Growth]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    pressed: bool = False
    deferred: set[int] = field(default_factory=set)
    skipped: set[Tenant] = field(default_factory=set)
    refused: list[Seq] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)

    def token_budget(self, seq: Seq) -> int:
        """Tokens that a sequence may compute."""
        if self.tokens is None:
            return self.budget
        left = self.tokens.left_to_begin if seq.status is Status.WAITING else self.tokens.left
        return min(self.budget, left(seq.tenant))

    def num_running(self, tenant: Tenant) -> int:
        return self.shares.num_running(tenant) if self.shares is not None else 0

    def add(self, seq: Seq, row: Row, growth: Growth) -> None:
        self.rows[row.seq_id] = row, growth
        self.budget -= row.num_tokens
        if self.tokens is not None:
            self.tokens.take(seq.tenant, row.num_tokens)

    def lose(self, seq_id: int) -> None:
        """Remove a sequence from this step."""
        self.lost.add(seq_id)
        dropped = self.rows.pop(seq_id, None)
        self.budget += dropped[0].num_tokens if dropped else 0

    def postpone(self, seq_id: int) -> None:
        """Remove its row, unless blocks were taken or copied for it."""
        row, growth = self.rows[seq_id]
        if not (growth.new_blocks or growth.copies):
            del self.rows[seq_id]
            self.budget += row.num_tokens

    def preempt(self, lost: Preempted) -> None:
        """Record a preemption, cancelling a start in this step."""
        self.lose(lost.seq_id)
        begun = [one for one in self.admitted if one.seq_id != lost.seq_id]
        if len(begun) == len(self.admitted):
            self.preempted.append(lost)
        self.admitted = begun

    def plan(self, memory: MemoryManager, snapshots: Snapshots[Seq] | None = None) -> StepPlan:
        """memory: its transfers are moved into the plan; snapshots: evicted ones are, too"""
        rows: list[Row] = []
        copies: list[tuple[int, int]] = []
        fresh: list[int] = []
        for row, growth in self.rows.values():
            rows.append(row)
            copies += growth.copies
            fresh += growth.new_blocks
        parked: list[int] = []
        dropped: list[int] = []
        if snapshots is not None and snapshots.has_changed:
            parked = [seq.seq_id for seq in snapshots.take_parked()]
            dropped = [seq.seq_id for seq in snapshots.take_gone()]
        return StepPlan(
            rows=tuple(rows),
            copies=tuple(copies),
            fresh=tuple(fresh),
            admitted=tuple(self.admitted),
            preempted=tuple(self.preempted),
            failed=tuple(self.failed),
            parked=tuple(parked),
            dropped=tuple(dropped),
            swap_out=tuple(memory.offload.parking.pop_moves_out()),
            swap_in=tuple(memory.offload.pop_moves_in()),
        )


@dataclass(slots=True, eq=False)
class SchedulerContext(Generic[Seq]):
    """Shared state. running: in the order of admission; num_steps: planned so far, including the current one;
    clock: prompt tokens processed so far, computed or found."""

    memory: MemoryManager
    max_num_seqs: int
    waiting: Queue[Seq]
    snapshots: Snapshots[Seq]
    running: list[Seq] = field(default_factory=list)
    num_steps: int = 0
    clock: int = 0

    def is_parked(self, seq: Seq) -> bool:
        """Whether host slots keep the content of this sequence's blocks."""
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
        """Leading tokens of a waiting sequence that need not be computed."""
        if self.is_parked(seq):
            return seq.num_computed
        snapshot, match = self.snapshot(seq), self.match(seq).num_tokens
        return match if snapshot is None else max(match, snapshot.num_computed)

    def snapshot(self, seq: Seq) -> Seq | None:
        """The snapshot for a waiting sequence to start with; None: exact blocks reach as far."""
        found = self.snapshots.find(seq) if seq.seeks_snapshot and not self.is_parked(seq) else None
        if found is None or self.match(seq).num_tokens >= found.num_computed:
            return None
        return found

    def must_wait(self, seq: Seq) -> bool:
        """Whether a waiting sequence has to keep waiting for a read from disk."""
        if seq.seeks_snapshot:
            if self.snapshots.must_wait(seq):
                return True
            if self.snapshots.has_missed(seq):
                self.prefetch(seq)
        return self.memory.offload.must_wait(seq.seq_id)

    def end_loading(self, seq: Seq) -> None:
        """End the reads of a sequence that has started or is gone."""
        if self.snapshots.below is not None:
            self.snapshots.leave(seq.seq_id)
        self.memory.offload.end_loading(seq.seq_id)

    def prefetch(self, seq: Seq) -> None:
        """Start reading the disk hits of a waiting sequence."""
        assert seq.keys is not None, f"sequence {seq.seq_id} was not added"
        self.memory.offload.end_loading(seq.seq_id)
        self.memory.offload.prefetch(seq.seq_id, seq.keys, seq.hit_limit)

    def compute(self, seq: Seq, num_tokens: int, step: StepPlanBuilder[Seq]) -> None:
        """Compute a sequence's next tokens; there is room for them."""
        num_drafts = max(0, num_tokens - seq.num_uncomputed)
        row = Row(seq.seq_id, seq.num_computed, num_tokens, seq.is_exact, num_drafts)
        step.add(seq, row, self.memory.grow(seq.seq_id, num_tokens, num_drafts))

    def fail(self, seq: Seq, step: StepPlanBuilder[Seq], error: Exception) -> None:
        """Keep a sequence out of this step and of the queue; the caller ends its request."""
        step.lose(seq.seq_id)
        step.failed.append((seq.seq_id, error))
        self.waiting.remove(seq)
