"""Who runs next, in which blocks, and who is compressed. The memory manager is asked before it is told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from itertools import chain
from typing import Generic

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import Growth
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.prefix.cache import PrefixMatch
from kvreclaim.memory.tiers.manager import TieredMemory
from kvreclaim.schedule.draft import Draft
from kvreclaim.schedule.ledger import compress
from kvreclaim.schedule.queue import Queue, Seq
from kvreclaim.schedule.room import known_growth, own_slots, slots_of_fork
from kvreclaim.schedule.sequence import Status
from kvreclaim.schedule.shares import FRACTION, PromptTokens, Shares
from kvreclaim.schedule.snapshots import Snapshots
from kvreclaim.schedule.step import Admitted, Pass, Preempted, PreemptionReason, Row, StepDone, StepPlan
from kvreclaim.schedule.victims import Preemption, victim_order
from kvreclaim.schedule.way import Way

logger = logging.getLogger(__name__)


class Scheduler(Generic[Seq]):
    """Decodes before prefill chunks; who comes first among them, and who is preempted, says the policy.

    fcfs:     by arrival. The last one admitted is preempted first.
    priority: by priority, the lowest number first, then by arrival. The last in this order is preempted
              first, when a running sequence needs blocks. Who waits preempts nobody, however important: it
              is admitted before all less important ones as soon as there is room (as in vLLM).

    A preempted sequence loses its blocks, keeps its tokens and waits in front of all others of its priority
    and tenant. Where the memory has host slots it may keep what its blocks hold, too (`preemption`): it is
    parked, and goes on where it was. victim_policy: who gives way (victims.py).

    Several tenants take turns and get equal parts (Queue, Shares, PromptTokens): of those that wait, and are
    equally important, the tenant with the fewest running ones is next; one that has its part gives way to
    one that has not; and in a step each may compute as many prompt tokens as the others. With one tenant
    nothing of this happens.

    A step: schedule; execute the plan; done; append what is drawn (or let done do it) and remove what has
    ended; compress; carry out the passes; compressed. Not thread-safe. Reads no clock.
    """

    def __init__(
        self,
        memory: MemoryManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        by_priority: bool,
        preemption: Preemption | None = None,
        victim_policy: str = "auto",
        max_snapshot_blocks: int = 0,
    ) -> None:
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: Queue[Seq] = Queue(by_rank=by_priority)
        self.running: list[Seq] = []
        self.preemption = preemption or Preemption()
        self.snapshots: Snapshots[Seq] = Snapshots(memory, max_snapshot_blocks)
        self._victims = victim_order(
            victim_policy, by_priority=by_priority, preemption=self.preemption, memory=memory
        )
        self._by_priority = by_priority
        self._known: dict[int, Seq] = {}
        self.num_steps = 0

    def add(self, seq: Seq) -> None:
        """Queue a sequence."""
        self._known[seq.seq_id] = seq
        seq.keys = self.memory.keys(seq.token_ids, seq.cache_salt, lasting=seq.lasting)
        seq.status = Status.WAITING
        self.waiting.add(seq)
        if isinstance(self.memory, TieredMemory):
            self.memory.prefetch(seq.seq_id, seq.keys, seq.hit_limit)

    def fork(self, parent: Seq, child: Seq) -> bool:
        """Let a new sequence run that shares every block and all lengths of another.

        Returns: whether it runs. If other tenants have the seats by now it waits, as if it had run and been
        preempted.
        """
        assert parent.keys is not None, f"sequence {parent.seq_id} was not added"
        child.keys = parent.keys.fork(child.token_ids)
        self._known[child.seq_id] = child
        if len(self.running) >= self.max_num_seqs:
            self.waiting.insert(child)
            return False
        child.num_computed = parent.num_computed
        child.account = parent.account.fork()
        self.memory.fork(parent.seq_id, child.seq_id, child.keys)
        child.status = Status.RUNNING
        self.running.append(child)
        return True

    def remove(self, seq: Seq) -> None:
        """Forget a sequence wherever it is and return its blocks; one that is not known is ignored."""
        self._known.pop(seq.seq_id, None)
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            seq.status = Status.ENDED
            self.memory.free(seq.seq_id)
        else:
            self.waiting.remove(seq)
            if isinstance(self.memory, TieredMemory):
                self.memory.drop_parked(seq.seq_id)
                self.memory.end_loading(seq.seq_id)
        seq.status = Status.ENDED

    def schedule(self) -> StepPlan:
        """The next step, room for its tokens included. No rows: nothing can run."""
        self.num_steps += 1
        step: Draft[Seq] = Draft(self.max_num_batched_tokens)
        self._decide(step)
        return step.plan(self.memory, self.snapshots)

    def _decide(self, step: Draft[Seq]) -> None:
        order = self.in_turn()
        tenants = {seq.tenant for seq in order} | self.waiting.tenants
        if len(tenants) < 2:
            self._continue_all(order, step)
            self._admit_all(step)
            return
        step.shares = Shares(self.memory, self.running, len(tenants), self.max_num_seqs)
        prompts = [seq for seq in order if seq.is_prefill]
        self._continue_all(order[: len(order) - len(prompts)], step)
        waiting = (self.waiting.line(tenant).seqs[: self.max_num_seqs] for tenant in self.waiting.tenants)
        step.tokens = tokens = PromptTokens(
            prompts, chain.from_iterable(waiting), step.budget, least=self.max_num_batched_tokens // FRACTION
        )
        self._admit_all(step)
        self._hold_back(step, step.shares)
        self._continue_all(sorted(prompts, key=lambda seq: tokens.wanted[seq.tenant]), step)

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
                    seq.last_step = self.num_steps
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

    def _fail(self, seq: Seq, step: Draft[Seq], error: Exception) -> None:
        """Keep a sequence out of this step and of the queue; the caller ends its request."""
        step.lose(seq.seq_id)
        step.failed.append((seq.seq_id, error))
        self.waiting.remove(seq)

    def in_turn(self) -> list[Seq]:
        """Those that run, as they take tokens of a step."""
        return sorted(self.running, key=self._turn)

    def _turn(self, seq: Seq) -> tuple[bool, bool, tuple[int, ...]]:
        """Its place in the order in which running sequences take tokens of a step."""
        prefill = seq.is_prefill
        return prefill, prefill and seq.is_due, seq.rank if self._by_priority else ()

    def _continue_all(self, sequences: list[Seq], step: Draft[Seq]) -> None:
        for seq in sequences:
            if step.budget == 0:
                break
            if seq.seq_id not in step.lost:
                try:
                    self._continue(seq, step)
                except Exception as error:
                    self._fail(seq, step, error)

    def _continue(self, seq: Seq, step: Draft[Seq]) -> None:
        """Let a running sequence compute its next tokens, at the expense of others if it must be.

        One whose pass was postponed inside its prompt waits as long as others go on: it would grow by a
        token a step beyond the blocks that it is to give back.
        """
        if seq.is_prefill and isinstance(self.memory, TieredMemory):
            seq.num_computed += self.memory.extend(seq.seq_id, seq.hit_limit)
        num_tokens = min(seq.next_chunk, step.budget if step.tokens is None else step.room(seq))
        if not num_tokens or (step.rows and seq.is_postponed):
            return
        while not self.memory.can_grow(seq.seq_id, num_tokens):
            if self.snapshots.give_way():
                continue
            victim = self._victim() if step.shares is None else step.shares.largest(self._victims)
            reason: PreemptionReason = "prefill" if seq.is_prefill else "decode"
            step.pressed = True
            self._preempt(victim, seq, "itself" if victim is seq else reason, step)
            if victim is seq:
                return
        step.add(seq, *self._grow(seq, num_tokens))

    def _grow(self, seq: Seq, num_tokens: int) -> tuple[Row, Growth]:
        row = Row(seq.seq_id, seq.num_computed, num_tokens, exact=not seq.reads_sparsely)
        return row, self.memory.grow(seq.seq_id, num_tokens)

    def _admit_all(self, step: Draft[Seq]) -> None:
        """Let those that wait begin, in their turn, while there is room for them and their tokens."""
        while not (step.pressed or step.failed) and step.budget > 0:
            seq = self.waiting.next(step.num_running, step.skipped, step.deferred)
            if seq is None or (step.refused and seq.priority > step.refused[0].seqs[0].priority):
                break
            if isinstance(self.memory, TieredMemory) and self.memory.must_wait(seq.seq_id):
                step.deferred.add(seq.seq_id)
                continue
            if not step.room(seq):
                step.skipped.add(seq.tenant)
                continue
            try:
                if self._admit(seq, step):
                    for line in step.refused:
                        line.passed += 1
                elif not self._may_pass(seq, step):
                    break
            except Exception as error:
                self._fail(seq, step, error)

    def _hold_back(self, step: Draft[Seq], shares: Shares[Seq]) -> None:
        """Where a tenant's first sequences begin, its first token waits for all that the step computes: no
        other tenant decodes more tokens than these have, or half a part of the seats."""
        begun = [self._known[one.seq_id] for one in step.admitted]
        counts = Counter(seq.tenant for seq in begun)
        new = {tenant for tenant, count in counts.items() if shares.num_running(tenant) == count}
        first = [seq for seq in begun if seq.tenant in new]
        if not first:
            return
        most = max(shares.seats // 2, sum(step.rows[seq.seq_id][0].num_tokens for seq in first))
        least, counts = max(seq.priority for seq in first), Counter()
        for seq in self.running:
            if seq.tenant not in new and seq.seq_id in step.rows and seq.priority >= least:
                counts[seq.tenant] += 1
                if counts[seq.tenant] > most and not seq.is_prefill:
                    step.postpone(seq.seq_id)

    def _may_pass(self, seq: Seq, step: Draft[Seq]) -> bool:
        """Whether sequences of other tenants may begin though there is no room for this one, whose turn it
        is: not for ever, unless it is its own tenant's that are in its way."""
        line = self.waiting.line(seq.tenant)
        if step.shares is None or step.tokens is None:
            return False
        step.skipped.add(seq.tenant)
        step.tokens.forget_waiting(seq.tenant)
        if step.shares.fills_itself(seq):
            return True
        step.refused.append(line)
        return line.passed < self.max_num_seqs

    def _admit(self, seq: Seq, step: Draft[Seq]) -> bool:
        """Let one that waits begin. Returns: whether there was room, or others have given way."""
        shares = step.shares
        has_seat = shares.has_seat(seq) if shares is not None else self._has_seat(seq)
        if not has_seat and (shares is None or not shares.may_ask_for_seat(seq)):
            return False
        snapshot = self.snapshots.find(seq) if not seq.num_computed else None
        if snapshot is not None and has_seat:
            return self._begin_as_fork(seq, snapshot, step)
        parked, match = self._parked_in(seq), self._match(seq)
        own, with_prompts = own_slots(seq, match, self.memory), shares is not None

        def needed(running: Iterable[Seq]) -> int:
            return own + known_growth(running, self.memory, prompts=with_prompts)

        fits = has_seat and self.memory.can_admit(match, needed(self.running))
        while has_seat and not fits and self.snapshots.give_way():
            match = self._match(seq)
            fits = self.memory.can_admit(match, needed(self.running))
        if not fits:
            victims = shares.victims(seq, match, needed) if shares is not None else []
            if not victims:
                return False
            for victim in victims:
                self._preempt(victim, seq, "fairness", step)
            match = self._match(seq)  # victims may have taken slots of the host
        if parked is not None:
            parked.resume(seq.seq_id, match)
        else:
            self.memory.admit(seq.seq_id, match, priority=seq.priority)
            seq.num_computed = match.num_tokens
        self.waiting.begin(seq)
        room = step.room(seq)
        self.running.append(seq)
        seq.status, seq.last_step = Status.RUNNING, self.num_steps
        num_loaded = len(match.lower) * self.memory.block_size
        step.admitted.append(Admitted(seq.seq_id, match.num_tokens, num_loaded, parked is not None))
        step.add(seq, *self._grow(seq, min(seq.next_chunk, room)))
        return True

    def _begin_as_fork(self, seq: Seq, snapshot: Seq, step: Draft[Seq]) -> bool:
        """Let one that waits begin with what a snapshot holds. Returns: whether there was room."""
        size, shares = self.memory.block_size, step.shares

        def fits() -> bool:
            slots = slots_of_fork(seq, snapshot, self.memory)
            slots += known_growth(self.running, self.memory, prompts=shares is not None)
            return blocks_for(slots, size) <= self.memory.num_free

        while not fits():
            if not self.snapshots.give_way(snapshot):
                if not self.running:  # it would hold its own snapshot's room for ever
                    self.snapshots.drop(snapshot.snapshot_key)
                    return self._admit(seq, step)
                return False
        unparked = False
        if isinstance(self.memory, TieredMemory) and self.memory.is_parked(snapshot.seq_id):
            self.memory.resume(snapshot.seq_id, self.memory.match_parked(snapshot.seq_id))
            unparked = True
        self.snapshots.begin(snapshot, seq)
        self.waiting.begin(seq)
        room = step.room(seq)
        self.running.append(seq)
        seq.status, seq.last_step = Status.RUNNING, self.num_steps
        step.admitted.append(
            Admitted(seq.seq_id, seq.num_computed, snapshot=snapshot.seq_id, unparked=unparked)
        )
        step.add(seq, *self._grow(seq, min(seq.next_chunk, room)))
        return True

    def _match(self, seq: Seq) -> PrefixMatch:
        """What need not be computed of one that waits."""
        if (parked := self._parked_in(seq)) is not None:
            return parked.match_parked(seq.seq_id)
        assert seq.keys is not None, f"sequence {seq.seq_id} was not added"
        return self.memory.match_prefix(seq.keys, max_tokens=seq.hit_limit)

    def _parked_in(self, seq: Seq) -> TieredMemory | None:
        """The memory, if it keeps what this sequence's blocks held."""
        memory = self.memory
        return memory if isinstance(memory, TieredMemory) and memory.is_parked(seq.seq_id) else None

    def _victim(self) -> Seq:
        """Who gives way when one that runs needs blocks."""
        places = range(len(self.running))
        return self.running[max(places, key=lambda place: (self._victims(self.running[place], place), place))]

    def _has_seat(self, seq: Seq) -> bool:
        return sum(other.seats for other in self.running) + seq.seats <= self.max_num_seqs

    def _preempt(self, victim: Seq, needy: Seq, reason: PreemptionReason, step: Draft[Seq]) -> None:
        """Take a sequence's blocks and its seat for one that needs some, itself maybe."""
        parked = self._park(victim, step)
        logger.info(
            "request %s (output %d, priority %d) is preempted for request %s (priority %d), reason %s: "
            "%d of %d blocks in use, %d tokens to %s",
            victim.request_id,
            victim.index,
            victim.priority,
            needy.request_id,
            needy.priority,
            reason,
            self.memory.pool.num_in_use,
            self.memory.pool.num_blocks,
            victim.num_computed,
            "bring back" if parked else "compute again",
        )
        self.running.remove(victim)
        if not parked:
            self.memory.free(victim.seq_id)
            victim.reset()
        victim.status = Status.WAITING
        self.waiting.add_back(victim)
        step.preempt(Preempted(victim.seq_id, reason, parked))

    def _park(self, victim: Seq, step: Draft[Seq]) -> bool:
        """Move what its blocks hold to slots, if that is wanted and there are some. Of one that has begun in
        this very step nothing is there yet; one that has come back in it just goes back."""
        if not isinstance(self.memory, TieredMemory):
            return False
        begun = next((one for one in step.admitted if one.seq_id == victim.seq_id), None)
        if begun is not None:
            return begun.resumed and self.memory.park(victim.seq_id)
        return self.preemption.swaps(victim, self.memory) and self.memory.park(victim.seq_id)
