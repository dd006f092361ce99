"""Who runs next, in which blocks, and who is compressed. The memory manager is asked before it is told."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Generic, TypeVar

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import Growth
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.schedule.ledger import compress
from kvreclaim.schedule.sequence import Sequence, Status
from kvreclaim.schedule.step import Admitted, Pass, Preempted, PreemptionReason, Row, StepDone, StepPlan
from kvreclaim.schedule.way import Way

logger = logging.getLogger(__name__)


Seq = TypeVar("Seq", bound=Sequence)


@dataclass(slots=True, eq=False)
class _Step:
    """A step in the making. budget: tokens that may still be added; lost: ids of preempted sequences."""

    budget: int
    rows: dict[int, tuple[Row, Growth]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)

    def add(self, row: Row, growth: Growth) -> None:
        self.rows[row.seq_id] = row, growth
        self.budget -= row.num_tokens

    def lose(self, seq_id: int) -> None:
        self.lost.add(seq_id)
        dropped = self.rows.pop(seq_id, None)
        self.budget += dropped[0].num_tokens if dropped else 0

    def plan(self) -> StepPlan:
        grown = [growth for _, growth in self.rows.values()]
        return StepPlan(
            rows=tuple(row for row, _ in self.rows.values()),
            copies=tuple(pair for growth in grown for pair in growth.copies),
            fresh=tuple(block for growth in grown for block in growth.new_blocks),
            admitted=tuple(self.admitted),
            preempted=tuple(self.preempted),
            failed=tuple(self.failed),
        )


class Scheduler(Generic[Seq]):
    """Decodes before prefill chunks; who comes first among them, and who is preempted, says the policy.

    fcfs:     by arrival. The last one admitted is preempted first.
    priority: by priority, the lowest number first, then by arrival. The last in this order is preempted
              first, when a running sequence needs blocks. Who waits preempts nobody, however important: it
              is admitted before all less important ones as soon as there is room (as in vLLM).

    A preempted sequence loses its blocks, keeps its tokens and waits in front of all others of its priority.

    A step: schedule; execute the plan; done; append what is drawn (or let done do it) and remove what has
    ended; compress; carry out the passes; compressed. Not thread-safe. Reads no clock.
    """

    def __init__(
        self, memory: MemoryManager, *, max_num_seqs: int, max_num_batched_tokens: int, by_priority: bool
    ) -> None:
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self._by_priority = by_priority
        self._known: dict[int, Seq] = {}

    def add(self, seq: Seq) -> None:
        """Queue a sequence."""
        self._known[seq.seq_id] = seq
        seq.keys = self.memory.keys(seq.token_ids, seq.cache_salt)
        seq.status = Status.WAITING
        if self._by_priority:
            insort(self.waiting, seq, key=attrgetter("rank"))
        else:
            self.waiting.append(seq)

    def fork(self, parent: Seq, child: Seq) -> None:
        """Let a new sequence run that shares every block and all lengths of another."""
        child.num_computed = parent.num_computed
        child.account = parent.account.fork()
        assert parent.keys is not None, f"sequence {parent.seq_id} was not added"
        child.keys = parent.keys.fork(child.token_ids)
        self.memory.fork(parent.seq_id, child.seq_id, child.keys)
        self._known[child.seq_id] = child
        child.status = Status.RUNNING
        self.running.append(child)

    def remove(self, seq: Seq) -> None:
        """Forget a sequence wherever it is and return its blocks; one that is not known is ignored."""
        self._known.pop(seq.seq_id, None)
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            seq.status = Status.ENDED
            self.memory.free(seq.seq_id)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.status = Status.ENDED

    def schedule(self) -> StepPlan:
        """The next step, room for its tokens included. No rows: nothing can run."""
        step = _Step(self.max_num_batched_tokens)
        for seq in sorted(self.running, key=self._turn):
            if step.budget == 0:
                break
            if seq.seq_id not in step.lost:
                try:
                    self._continue(seq, step)
                except Exception as error:
                    self._fail(seq, step, error)
        while not step.lost and step.budget > 0 and self.waiting:
            seq = self.waiting[0]
            try:
                if not self._admit(seq, step):
                    break
            except Exception as error:
                self._fail(seq, step, error)
        return step.plan()

    def done(self, plan: StepPlan, done: StepDone) -> list[tuple[int, Exception]]:
        """Take in what became of a plan: lengths advance, and what is exact can be hit from now on.

        To be called once for each plan. Returns: sequences that could not be taken in; their requests end.
        """
        failed = []
        computed = set(done.computed)
        for row in plan.rows:
            if row.seq_id in computed and (seq := self._known.get(row.seq_id)) is not None:
                try:
                    self.memory.commit(seq.seq_id, row.num_tokens, exact=row.exact)
                    seq.num_computed += row.num_tokens
                    seq.token_ids.extend(done.tokens.get(row.seq_id, ()))
                except Exception as error:
                    failed.append((row.seq_id, error))
        self.memory.settle()
        return failed

    def compress(self, sequences: Iterable[Seq]) -> list[Pass[int]]:
        """The passes of those that are due, in this order; tables and lengths are changed at return. A pass
        whose blocks cannot be had is postponed: its sequence stays due.

        A pass under Way.MASK or Way.BLOCKS is to be followed by `compressed`.
        """
        found = []
        for seq in sequences:
            if seq.status is Status.RUNNING and seq.is_due:
                done = compress(
                    seq.seq_id, seq.num_computed, seq.num_prompt, seq.footprint, seq.account, self.memory
                )
                if done is not None:
                    found.append(done)
        return found

    def compressed(self, done: Pass[int], gone: ListLike[int], prompt_slots: int | None) -> Pass[int]:
        """A choice has been made that nothing moves for: these full entries of the sequence's table go, and
        so many leading slots hold prompt tokens now (None: as planned). Returns: the pass as it came out."""
        seq = self._known[done.seq_id]
        give_back = self.memory.punch if done.way is Way.MASK else self.memory.drop_blocks
        self.memory.mark_inexact(seq.seq_id)
        freed = give_back(seq.seq_id, gone) if gone else 0
        seq.account.blocks_freed += freed
        if prompt_slots is not None:
            seq.account.prompt_slots = prompt_slots
        left = (block for index, block in enumerate(done.source_ids) if index not in set(gone))
        return replace(done, target_ids=tuple(left), blocks_freed=freed)

    def _fail(self, seq: Seq, step: _Step, error: Exception) -> None:
        """Keep a sequence out of this step and of the queue; the caller ends its request."""
        step.lose(seq.seq_id)
        step.failed.append((seq.seq_id, error))
        if seq in self.waiting:
            self.waiting.remove(seq)

    def _turn(self, seq: Seq) -> tuple[bool, bool, tuple[int, ...]]:
        """Its place in the order in which running sequences take tokens of a step."""
        return _is_prefill(seq), _is_postponed(seq), seq.rank if self._by_priority else ()

    def _continue(self, seq: Seq, step: _Step) -> None:
        """Let a running sequence compute its next tokens, at the expense of others if it must be.

        One whose pass was postponed inside its prompt waits as long as others go on: it would grow by a
        token a step beyond the blocks that it is to give back.
        """
        if step.rows and _is_postponed(seq):
            return
        num_tokens = min(seq.next_chunk, step.budget)
        while not self.memory.can_grow(seq.seq_id, num_tokens):
            victim = max(self.running, key=attrgetter("rank")) if self._by_priority else self.running[-1]
            step.lose(victim.seq_id)
            step.preempted.append(self._preempt(victim, seq))
            if victim is seq:
                return
        step.add(*self._grow(seq, num_tokens))

    def _grow(self, seq: Seq, num_tokens: int) -> tuple[Row, Growth]:
        row = Row(seq.seq_id, seq.num_computed, num_tokens, exact=not seq.reads_sparsely)
        return row, self.memory.grow(seq.seq_id, num_tokens)

    def _admit(self, seq: Seq, step: _Step) -> bool:
        """Let the first that waits begin. Returns: whether there was room."""
        if sum(other.seats for other in self.running) + seq.seats > self.max_num_seqs:
            return False
        assert seq.keys is not None, f"sequence {seq.seq_id} was not added"
        match = self.memory.match_prefix(seq.keys, max_tokens=seq.hit_limit)
        known = len(seq.token_ids)
        held = seq.footprint.slots_needed(seq.num_prompt, known)
        needed = max(1, held - match.num_tokens) + self._known_growth()
        first_pass = seq.footprint.first_pass(seq.num_prompt)
        if seq.footprint.way.moves and first_pass is not None and first_pass < known:
            # Its blocks are its own from then on, while others go on holding those that it shared.
            needed += self.memory.num_shared(match) * self.memory.block_size
        if not self.memory.can_admit(match, needed):
            return False
        self.memory.admit(seq.seq_id, match, priority=seq.priority)
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.num_computed = match.num_tokens
        step.admitted.append(Admitted(seq.seq_id, match.num_tokens))
        step.add(*self._grow(seq, min(seq.next_chunk, step.budget)))
        return True

    def _known_growth(self) -> int:
        """Slots that running sequences will still take and whose number is known: up to the next pass of
        those whose blocks then come back. Admitting into them would only preempt somebody soon."""
        size = self.memory.block_size
        growth = 0
        for seq in self.running:
            if seq.footprint.bounded:
                peak = min(seq.max_len, seq.footprint.decode_cap)
                held = len(self.memory.table(seq.seq_id).block_ids)
                growth += max(0, blocks_for(peak, size) - held) * size
        return growth

    def _preempt(self, victim: Seq, needy: Seq) -> Preempted:
        """Take a sequence's blocks for one that needs some, itself maybe."""
        reason: PreemptionReason = "prefill" if _is_prefill(needy) else "decode"
        if victim is needy:
            reason = "itself"
        logger.info(
            "request %s (output %d, priority %d) is preempted for request %s (priority %d), reason %s: "
            "%d of %d blocks in use, %d tokens to compute again",
            victim.request_id,
            victim.index,
            victim.priority,
            needy.request_id,
            needy.priority,
            reason,
            self.memory.pool.num_in_use,
            self.memory.pool.num_blocks,
            victim.num_computed,
        )
        self.running.remove(victim)
        self.memory.free(victim.seq_id)
        victim.reset()
        victim.status = Status.WAITING
        if self._by_priority:
            insort(self.waiting, victim, key=attrgetter("rank"))
        else:
            self.waiting.insert(0, victim)
        return Preempted(victim.seq_id, reason)


def _is_prefill(seq: Sequence) -> bool:
    return seq.num_uncomputed > 1


def _is_postponed(seq: Sequence) -> bool:
    """Whether a pass inside its prompt has lacked blocks."""
    return _is_prefill(seq) and seq.is_due
