"""Plans each step: running sequences, their blocks, and compression passes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from itertools import chain
from operator import attrgetter
from typing import Generic

from kvreclaim.checks import check_choice
from kvreclaim.memory.changes import NO_GROWTH
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.schedule.admission import Admission
from kvreclaim.schedule.budget.compaction import Pass
from kvreclaim.schedule.budget.drops import Drop
from kvreclaim.schedule.budget.ledger import compress, drop_spans, take_choice
from kvreclaim.schedule.cache_first import CacheFirst
from kvreclaim.schedule.companions import Companions
from kvreclaim.schedule.fair_share import FRACTION, FairShare, PromptTokens, kept_seats
from kvreclaim.schedule.in_flight import InFlight
from kvreclaim.schedule.preemption import Preemptor
from kvreclaim.schedule.preemption_cost import PreemptionCostModel, victim_order
from kvreclaim.schedule.queue import Queue, Seq
from kvreclaim.schedule.sequence import Status
from kvreclaim.schedule.snapshots import Snapshots
from kvreclaim.schedule.state import SchedulerContext, StepPlanBuilder
from kvreclaim.schedule.step import PreemptionReason, Row, StepDone, StepPlan

logger = logging.getLogger(__name__)

POLICIES = ("fcfs", "priority", "cache")
"""Orders of the waiting queue."""


class Scheduler(Generic[Seq]):
    """Schedules decodes before prefill chunks; the policy orders sequences and chooses victims.

    fcfs:     by arrival. The last one admitted is preempted first.
    priority: by priority, the lowest number first, then by arrival. The last in this order is preempted
              first, when a running sequence needs blocks. Waiting sequences never preempt running ones; they
              are admitted before all less important ones as soon as there is room (as in vLLM).
    cache:    as priority, but among waiting sequences of equal importance the one with most of its prompt
              in the cache comes first, within a bound on the others' waiting (CacheFirst).

    Under each of them a prompt waits for a shared prefix that another sequence is computing (InFlight).

    The outputs of a request are preempted together (exceptions: preemption_cost.py).

    A preempted sequence loses its blocks, keeps its tokens and waits in front of all others of its priority
    and tenant. If the memory has host slots, its blocks' content may be kept (`preemption`): it is parked and
    resumes where it was. preemption_victim: the choice of victims (preemption_cost.py).

    Several tenants take turns and get equal parts (Queue, FairShare, PromptTokens): of waiting sequences of
    equal importance, the tenant with the fewest running ones is next; a tenant above its part is preempted
    for one below it; and in a step each may compute as many prompt tokens as the others. With one tenant none
    of this applies.

    A step: schedule; execute the plan; done; append sampled tokens (or let done do it) and remove finished
    sequences; compress; execute the passes; compressed. Not thread-safe. Reads no clock, except for snapshots
    kept for a time.
    """

    def __init__(
        self,
        memory: MemoryManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
        preemption: PreemptionCostModel | None = None,
        preemption_victim: str = "auto",
        max_snapshot_blocks: int = 0,
    ) -> None:
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        check_choice("scheduling_policy", policy, POLICIES)
        self.policy, by_priority = policy, policy != "fcfs"
        self.waiting: Queue[Seq] = Queue(by_rank=by_priority)
        self.running: list[Seq] = []
        self.preemption = preemption or PreemptionCostModel()
        self.snapshots: Snapshots[Seq] = Snapshots(memory, max_snapshot_blocks)
        self.companions: Companions[Seq] | None = None
        self._state = SchedulerContext(memory, max_num_seqs, self.waiting, self.snapshots, self.running)
        order = victim_order(
            preemption_victim, by_priority=by_priority, preemption=self.preemption, memory=memory
        )
        self.preemptor = Preemptor(self._state, order, self.preemption)
        self._admission = Admission(self._state, self.preemptor)
        if policy == "cache":
            self.waiting.order_by(CacheFirst(self._state, max_num_batched_tokens))
        self._by_priority = by_priority
        self._known: dict[int, Seq] = {}

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._state.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._state.num_steps = value

    @property
    def in_flight(self) -> InFlight[Seq]:
        """Sequences that wait for blocks being computed by others."""
        return self._admission.in_flight

    def take_in(self, companions: Companions[Seq]) -> None:
        """Evict companions that share the pool first."""
        self.companions = companions

    def add(self, seq: Seq) -> None:
        """Queue a sequence."""
        self._known[seq.seq_id] = seq
        seq.keys = self.memory.keys(seq.token_ids, seq.cache_salt, lasting=seq.lasting)
        seq.status, seq.arrived_at = Status.WAITING, self._state.clock
        self.waiting.add(seq)
        if not (seq.seeks_snapshot and self.snapshots.has_requested(seq)):
            self._state.prefetch(seq)

    def fork(self, parent: Seq, child: Seq) -> bool:
        """Start a new sequence that shares every block and all lengths of another.

        Returns: whether it runs. If other tenants have the seats by now it waits, as if it had been
        preempted.
        """
        assert parent.keys is not None, f"sequence {parent.seq_id} was not added"
        child.keys, child.arrived_at = parent.keys.fork(child.token_ids), parent.arrived_at
        self._known[child.seq_id] = child
        if kept_seats(self.running) + child.kept_seats > self.max_num_seqs:
            self.waiting.insert(child)
            return False
        self._run_as_fork(parent, child)
        return True

    def fork_followers(self, leader: Seq) -> list[Seq]:
        """Fork the sequences that wait for a leader: it has computed their common tokens."""
        followers, leader.followers, leader.seats = leader.followers, [], 1
        for seq in followers:  # later blocks differ, so the leader's later keys are not theirs
            seq.keys = self.memory.keys(seq.token_ids, seq.cache_salt, lasting=seq.lasting)
            self._run_as_fork(leader, seq)
        return followers

    def _run_as_fork(self, parent: Seq, child: Seq) -> None:
        assert child.keys is not None, f"sequence {child.seq_id} has no keys"
        child.num_computed = parent.num_computed
        child.account, child.dropped = parent.account.fork(), parent.dropped
        self.memory.fork(parent.seq_id, child.seq_id, child.keys)
        child.status, child.last_step = Status.RUNNING, self._state.num_steps
        self.running.append(child)

    def remove(self, seq: Seq) -> None:
        """Remove a sequence in any state and free its blocks; unknown ones are ignored."""
        self._known.pop(seq.seq_id, None)
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            seq.status = Status.ENDED
            self.memory.free(seq.seq_id)
        else:
            self.waiting.remove(seq)
            self._state.end_loading(seq)
            self.memory.offload.parking.drop_parked(seq.seq_id)
        seq.status = Status.ENDED

    def put_back(self, seq: Seq) -> None:
        """Requeue a sequence started in the last step that has computed nothing, because its loaded prefix
        did not arrive."""
        self.running.remove(seq)
        self.memory.free(seq.seq_id)
        seq.reset()
        seq.status = Status.WAITING
        self.waiting.add_back(seq)

    def schedule(self) -> StepPlan:
        """Plan the next step and allocate its blocks. No rows: nothing can run."""
        self._state.num_steps += 1
        step: StepPlanBuilder[Seq] = StepPlanBuilder(self.max_num_batched_tokens)
        self._decide(step)
        return step.plan(self.memory, self.snapshots)

    def _decide(self, step: StepPlanBuilder[Seq]) -> None:
        order = self.in_turn()
        tenants = {seq.tenant for seq in order} | self.waiting.tenants
        if len(tenants) < 2:
            self._continue_all(order, step)
            self._make_room_for_passes(step)
            self._admission.all(step)
            if step.admitted:
                self._make_room_for_passes(step)
            return
        step.shares = FairShare(self.memory, self.running, len(tenants), self.max_num_seqs)
        prompts = [seq for seq in order if seq.is_prefill]
        self._continue_all(order[: len(order) - len(prompts)], step)
        waiting = (self.waiting.line(tenant).seqs[: self.max_num_seqs] for tenant in self.waiting.tenants)
        step.tokens = tokens = PromptTokens(
            prompts, chain.from_iterable(waiting), step.budget, least=self.max_num_batched_tokens // FRACTION
        )
        self._admission.all(step)
        self._admission.hold_back(step, step.shares)
        self._continue_all(sorted(prompts, key=lambda seq: tokens.pending[seq.tenant]), step)
        self._make_room_for_passes(step)

    def update_from_output(self, plan: StepPlan, done: StepDone) -> list[tuple[int, Exception]]:
        """Record the results of a plan: lengths advance, and exact blocks become hittable.

        Call once for each plan. Returns: sequences with invalid results and the errors; their requests end.
        """
        failed = []
        computed, num_steps = set(done.computed), self._state.num_steps
        for row in plan.rows:
            if row.seq_id in computed and (seq := self._known.get(row.seq_id)) is not None:
                try:
                    num_tokens = done.num_accepted.get(row.seq_id, row.num_tokens)
                    self.memory.commit(seq.seq_id, num_tokens, exact=row.exact)
                    seq.num_computed += num_tokens
                    if seq.draft_ids:
                        seq.draft_ids = []
                    if seq.footprint.trailing is not None and (
                        window_start := seq.footprint.window_start(seq.num_computed)
                    ):
                        self.memory.release_out_of_window(seq.seq_id, window_start)
                    if row.first < seq.num_prompt:
                        self._state.clock += min(seq.num_computed, seq.num_prompt) - row.first
                    seq.last_step = num_steps
                    if done.tokens:
                        seq.token_ids.extend(done.tokens.get(row.seq_id, ()))
                except Exception as error:
                    failed.append((row.seq_id, error))
        self.memory.release_copy_sources()
        return failed

    def compress(self, sequences: Iterable[Seq]) -> list[Pass[int]]:
        """Plan the passes of the due sequences, in this order; tables and lengths are changed at return.
        `schedule` has reserved the blocks of a step's passes, in the order of its rows, forks first.

        A pass that evicts whole blocks is followed by `compressed`.
        """
        return [self._pass(seq) for seq in sequences if seq.status is Status.RUNNING and seq.is_due]

    def _pass(self, seq: Seq) -> Pass[int]:
        """Plan the pass of a due sequence. Since the step was planned, companions may have taken blocks, and
        drops may have cancelled a pass that would have freed some."""
        lengths = seq.num_computed, seq.num_prompt
        while True:
            done = compress(seq.seq_id, *lengths, seq.footprint, seq.account, self.memory)
            if done is not None:
                seq.dropped = ()
                return done
            gave = self._evict_companion() or self.snapshots.forget_one()
            assert gave, f"sequence {seq.seq_id} lacks blocks for its pass: {self.memory.stats()}"

    def compressed(self, done: Pass[int], gone: ListLike[int], prompt_slots: int | None) -> Pass[int]:
        """Apply take_choice to a running sequence."""
        return take_choice(done, gone, prompt_slots, self._known[done.seq_id].account, self.memory)

    def drop(self, seq: Seq) -> Drop | None:
        """Drop the due spans of a running sequence, before its pass; tables and lengths are changed at
        return. None: nothing to drop."""
        lengths = seq.num_computed, seq.num_prompt
        if seq.status is not Status.RUNNING or not seq.footprint.drops_now(*lengths, seq.account):
            return None
        done, seq.dropped = drop_spans(
            seq.seq_id, seq.num_computed, seq.footprint, seq.account, seq.dropped, self.memory
        )
        return done if done.entries else None

    def in_turn(self) -> list[Seq]:
        """The running sequences, in the order in which they get tokens of a step."""
        running = sorted(self.running, key=attrgetter("rank")) if self._by_priority else self.running
        prompts = [seq for seq in running if len(seq.token_ids) - seq.num_computed > 1]
        if not prompts:
            return running[:]
        return [seq for seq in running if len(seq.token_ids) - seq.num_computed <= 1] + prompts

    def _continue_all(self, sequences: list[Seq], step: StepPlanBuilder[Seq]) -> None:
        for left, seq in zip(range(len(sequences) - 1, -1, -1), sequences, strict=True):
            if step.budget == 0:
                break
            if seq.seq_id not in step.lost:
                try:
                    if not self._decode(seq, step):
                        self._continue(seq, step, left)
                except Exception as error:
                    self._state.fail(seq, step, error)

    def _decode(self, seq: Seq, step: StepPlanBuilder[Seq]) -> bool:
        """Compute a running sequence's newest token in the blocks that it holds. Returns: whether that was
        all; otherwise _continue decides."""
        footprint, first = seq.footprint, seq.num_computed
        if len(seq.token_ids) != first + 1 or seq.draft_ids or seq.followers or step.tokens is not None:
            return False
        if footprint.sparse is not None:
            return False
        if not self.memory.has_room(seq.seq_id, 1):
            return False
        exact = footprint.all_exact or seq.is_exact
        step.rows[seq.seq_id] = Row(seq.seq_id, first, 1, exact), NO_GROWTH
        step.budget -= 1
        return True

    def _continue(self, seq: Seq, step: StepPlanBuilder[Seq], num_left: int) -> None:
        """Compute a running sequence's next tokens, preempting others if necessary. num_left: later
        sequences, which have priority over this one's drafts."""
        if seq.is_prefill and seq.footprint.sparse is None:
            seq.num_computed += self.memory.offload.extend(seq.seq_id, seq.hit_limit)
        num_tokens = seq.chunk_of(step.budget if step.tokens is None else step.token_budget(seq), step.budget)
        if not num_tokens:
            return
        if seq.draft_ids:
            num_tokens = self._with_drafts(seq, min(num_tokens, step.budget - num_left))
        while not self.memory.can_grow(seq.seq_id, num_tokens):
            self._give_blocks(seq, step)
            if seq.seq_id in step.lost:
                return
        self._state.compute(seq, num_tokens, step)

    def _give_blocks(self, seq: Seq, step: StepPlanBuilder[Seq]) -> None:
        """Preempt until a running sequence has its blocks."""
        if self.snapshots.evict_one() or self._evict_companion():
            return
        preemptor, shares = self.preemptor, step.shares
        victims = preemptor.victims(seq) if shares is None else shares.largest(preemptor.order, seq)
        reason: PreemptionReason = "prefill" if seq.is_prefill else "decode"
        step.pressed = True
        preemptor.preempt(victims, seq, "itself" if seq in victims else reason, step)

    def _make_room_for_passes(self, step: StepPlanBuilder[Seq]) -> None:
        """Reserve blocks for this step's passes, which write no shared blocks. A postponed pass would choose
        among other tokens than alone."""
        while True:
            due = []
            for seq_id, (row, _) in step.rows.items():
                seq = self._known[seq_id]
                if seq.footprint.eviction_method.moves and seq.is_due_after(row.num_tokens):
                    due.append(seq)
            if not due:
                return
            due.sort(key=lambda seq: not seq.is_to_fork)
            keep = ((seq.seq_id, seq.kept_after(step.rows[seq.seq_id][0].num_tokens)) for seq in due)
            drafting = {seq_id for seq_id, (row, _) in step.rows.items() if row.num_drafts}
            lacking = self.memory.first_lacking(keep, drafting)
            if lacking is None:
                return
            self._give_blocks(self._known[lacking], step)

    def _with_drafts(self, seq: Seq, num_tokens: int) -> int:
        """Trim drafts to the free blocks; drafts never trigger preemption."""
        num_tokens = max(num_tokens, seq.num_uncomputed)
        while num_tokens > seq.num_uncomputed and not self.memory.can_grow(seq.seq_id, num_tokens):
            num_tokens -= 1
        return num_tokens

    def _evict_companion(self) -> bool:
        """Evict a companion. Returns: whether blocks of this memory were freed."""
        companions = self.companions
        return companions is not None and companions.memory is self.memory and companions.evict_one()
