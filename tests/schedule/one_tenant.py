"""Slow twin of the scheduler for one tenant: a list that waits, and nothing about shares."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from operator import attrgetter

from kvreclaim.schedule.admission import known_growth, own_slots
from kvreclaim.schedule.scheduler import Scheduler
from kvreclaim.schedule.sequence import ScheduledSequence, Status
from kvreclaim.schedule.state import StepPlanBuilder
from kvreclaim.schedule.step import Admitted, Preempted, StepPlan


class OneTenant(Scheduler[ScheduledSequence]):
    """The order is that of one list. The last to come, or the least important one, is preempted."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.waiting = []

    def add(self, seq):
        self._known[seq.seq_id] = seq
        seq.keys = self.memory.keys(seq.token_ids, seq.cache_salt)
        seq.status, seq.arrived_at = Status.WAITING, self._state.clock
        self._queue(seq, len(self.waiting))

    def remove(self, seq):
        if seq in self.waiting:
            self.waiting.remove(seq)
            seq.status = Status.ENDED
            self._known.pop(seq.seq_id)
        elif seq.status is Status.RUNNING:
            super().remove(seq)

    def _queue(self, seq, place):
        if self._by_priority:
            insort(self.waiting, seq, key=attrgetter("rank"))
        else:
            self.waiting.insert(place, seq)

    def schedule(self) -> StepPlan:
        step = StepPlanBuilder(self.max_num_batched_tokens)
        for seq in sorted(self.running, key=lambda seq: (seq.is_prefill, seq.rank * self._by_priority)):
            if step.budget and seq.seq_id not in step.lost:
                self._continue(seq, step)
        self._before_passes(step)
        left = [] if step.lost else list(self.waiting)
        self.in_flight.num_waiting = 0
        while left and step.budget:
            seq = left.pop(0) if self.policy != "cache" else left.pop(self._least(left))
            if self.in_flight.must_wait(seq):
                continue
            if not self._begins(seq, step):
                break
        self._before_passes(step)
        return step.plan(self.memory)

    def _least(self, left) -> int:
        first = min(seq.priority for seq in left)
        keys = [(seq.priority, self._key(seq) if seq.priority == first else 0, seq.rank) for seq in left]
        return keys.index(min(keys))

    def _key(self, seq) -> int:
        found = self.memory.match_prefix(seq.keys, max_tokens=seq.hit_limit).num_tokens
        return seq.arrived_at - 4 * min(found, 2 * self.max_num_batched_tokens)

    def _continue(self, seq, step):
        num_tokens = min(seq.next_chunk, step.budget)
        while not self.memory.can_grow(seq.seq_id, num_tokens):
            if self._preempt(seq, step) is seq:
                return
        self._state.compute(seq, num_tokens, step)

    def _preempt(self, seq, step) -> ScheduledSequence:
        victim = max(self.running, key=attrgetter("rank")) if self._by_priority else self.running[-1]
        reason = "itself" if victim is seq else "prefill" if seq.is_prefill else "decode"
        group = [other for other in self.running if other.request_id == victim.request_id]
        for each in [victim] if seq in group else group[::-1]:
            step.preempt(Preempted(each.seq_id, reason))
            self.running.remove(each)
            self.memory.free(each.seq_id)
            each.reset()
            each.status = Status.WAITING
            self._queue(each, 0)
        return victim

    def _before_passes(self, step):
        """Sequences give way until each pass behind this step, in its turn, finds enough blocks."""
        while step.rows:
            refs = Counter(block for seq in self.running for block in self.memory.blocks(seq.seq_id))
            free = self.memory.pool.num_blocks - len(refs)
            for seq in sorted(map(self._known.get, step.rows), key=lambda seq: seq.seats == 1):
                length = seq.num_computed + step.rows[seq.seq_id][0].num_tokens
                footprint, account = seq.footprint, seq.account
                if footprint.eviction_method.moves and footprint.is_due(length, seq.num_prompt, account):
                    keep = -(-footprint.kept(length - account.num_evicted) // self.memory.block_size)
                    blocks = self.memory.blocks(seq.seq_id)
                    own = sum(refs[block] == 1 for block in blocks)
                    if keep - own > free:
                        self._preempt(seq, step)
                        break
                    free += own - keep
                    refs.subtract(block for block in blocks if refs[block] > 1)
            else:
                return

    def _begins(self, seq, step) -> bool:
        if sum(other.seats for other in self.running) + seq.seats > self.max_num_seqs:
            return False
        match = self.memory.match_prefix(seq.keys, max_tokens=seq.hit_limit)
        needed = own_slots(seq, match, self.memory) + known_growth(self.running, self.memory, prompts=False)
        if not self.memory.can_admit(match, needed):
            return False
        self.memory.admit(seq.seq_id, match, priority=seq.priority)
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.num_computed = match.num_tokens
        step.admitted.append(Admitted(seq.seq_id, match.num_tokens))
        self._state.clock += min(match.num_tokens, seq.num_prompt)
        self._state.compute(seq, min(seq.next_chunk, step.budget), step)
        return True
