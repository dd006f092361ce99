"""A step in the making."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from kvreclaim.memory.changes import Growth
from kvreclaim.memory.kv_memory import KVMemory
from kvreclaim.schedule.fair_share import FairShare, PromptTokens
from kvreclaim.schedule.queue import Seq, Tenant
from kvreclaim.schedule.sequence import Status
from kvreclaim.schedule.snapshots import Snapshots
from kvreclaim.schedule.step import Admitted, Preempted, Row, StepPlan


@dataclass(slots=True, eq=False)
class StepPlanBuilder(Generic[Seq]):
    """A step plan in the making.

    budget:  tokens that may still be added
    shares:  of the tenants, if there are several; tokens: of their prompts, once decodes have theirs
    lost:    ids of sequences that have been preempted or failed
    pressed: running sequences lack blocks, so nobody else begins
    deferred: ids of sequences that wait for what is being loaded, or computed
    skipped: tenants whose turn is over; refused: sequences of such that found no room
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
        """Sequences of one of several tenants."""
        return self.shares.num_running(tenant) if self.shares is not None else 0

    def add(self, seq: Seq, row: Row, growth: Growth) -> None:
        self.rows[row.seq_id] = row, growth
        self.budget -= row.num_tokens
        if self.tokens is not None:
            self.tokens.take(seq.tenant, row.num_tokens)

    def lose(self, seq_id: int) -> None:
        """It computes nothing in this step."""
        self.lost.add(seq_id)
        dropped = self.rows.pop(seq_id, None)
        self.budget += dropped[0].num_tokens if dropped else 0

    def postpone(self, seq_id: int) -> None:
        """It computes its tokens another time, unless blocks were taken or are to be copied for them."""
        row, growth = self.rows[seq_id]
        if not (growth.new_blocks or growth.copies):
            del self.rows[seq_id]
            self.budget += row.num_tokens

    def preempt(self, lost: Preempted) -> None:
        """One that has begun in this very step has not begun."""
        self.lose(lost.seq_id)
        begun = [one for one in self.admitted if one.seq_id != lost.seq_id]
        if len(begun) == len(self.admitted):
            self.preempted.append(lost)
        self.admitted = begun

    def plan(self, memory: KVMemory, snapshots: Snapshots[Seq] | None = None) -> StepPlan:
        """memory: whose moves between tiers the plan takes over; snapshots: those that gave way."""
        grown = [growth for _, growth in self.rows.values()]
        return StepPlan(
            rows=tuple(row for row, _ in self.rows.values()),
            copies=tuple(pair for growth in grown for pair in growth.copies),
            fresh=tuple(block for growth in grown for block in growth.new_blocks),
            admitted=tuple(self.admitted),
            preempted=tuple(self.preempted),
            failed=tuple(self.failed),
            parked=() if snapshots is None else tuple(seq.seq_id for seq in snapshots.take_parked()),
            dropped=() if snapshots is None else tuple(seq.seq_id for seq in snapshots.take_gone()),
            swap_out=tuple(memory.offload.parking.pop_swap_outs()),
            swap_in=tuple(memory.offload.pop_swap_ins()),
        )
