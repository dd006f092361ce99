"""Admission: chooses the next waiting sequence, its cached blocks and the slots that it needs; and what a
step leaves to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.schedule.fair_share import FairShare
from kvreclaim.schedule.in_flight import InFlight, InFlightStates
from kvreclaim.schedule.preemption import Preemptor
from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.sequence import ScheduledSequence, Status
from kvreclaim.schedule.state import SchedulerContext, StepPlanBuilder
from kvreclaim.schedule.step import Admitted


def own_slots(seq: ScheduledSequence, match: PrefixMatch, memory: MemoryManager) -> int:
    """Slots that a sequence takes besides the blocks of its prefix match."""
    if memory.offload.parking.is_parked(seq.seq_id):
        return _slots_to_resume(seq, match, memory)
    known = len(seq.token_ids)
    slots = max(1, seq.footprint.slots_needed(seq.num_prompt, known) - match.num_tokens)
    if seq.footprint.windows:
        slots = blocks_for(slots, memory.block_size) * memory.block_size
        slots += seq.footprint.window_slots(known) - len(match.window_blocks) * memory.block_size
    first_pass = seq.footprint.first_pass(seq.num_prompt)
    if seq.footprint.eviction_method.moves and first_pass is not None and first_pass < known:
        # Its blocks become its own, while others keep the shared ones.
        slots += memory.num_shared(match) * memory.block_size
    return slots + len(match.lower) * memory.block_size + _slots_of_followers(seq, memory.block_size)


def _slots_of_followers(seq: ScheduledSequence, size: int) -> int:
    """Slots of the sequences that will fork from it: after the common tokens, or all if passes make blocks
    their own."""
    slots = 0
    for follower in seq.followers:
        known = len(follower.token_ids)
        slots += seq.footprint.window_slots(known)
        if _becomes_own(seq):
            slots += blocks_for(seq.footprint.slots_needed(seq.num_prompt, known), size) * size
        else:
            slots += (blocks_for(known, size) - seq.fork_at // size) * size
    return slots


def _becomes_own(seq: ScheduledSequence) -> bool:
    """Whether passes will copy blocks that it shares."""
    first_pass = seq.footprint.first_pass(seq.num_prompt)
    moves = seq.footprint.eviction_method.moves and seq.footprint.bounded
    return moves and first_pass is not None and first_pass < seq.max_len


def slots_of_fork(seq: ScheduledSequence, snapshot: ScheduledSequence, memory: MemoryManager) -> int:
    """Slots of a fork of a snapshot: those after the shared blocks, with a copy of the last one, or all of
    them if a later pass makes blocks its own; and the snapshot's, if it has to be loaded first."""
    size, known, footprint = memory.block_size, len(seq.token_ids), seq.footprint
    parking, snapshot_id = memory.offload.parking, snapshot.seq_id
    parked = parking.parked(snapshot_id) if parking.is_parked(snapshot_id) else None
    table = memory.table(snapshot_id) if parked is None else parked.table
    blocks = memory.num_to_fork(table, known - snapshot.num_computed)
    if footprint.eviction_method.moves and footprint.bounded:
        blocks = max(blocks, blocks_for(footprint.slots_needed(seq.num_prompt, known), size))
    slots = blocks * size + footprint.window_slots(known)
    return slots if parked is None else slots + len(parked.held) * size


def _slots_to_resume(seq: ScheduledSequence, match: PrefixMatch, memory: MemoryManager) -> int:
    """Slots of a parked sequence and its group: those held before, their next tokens, and certain growth."""
    size, parking, growth = memory.block_size, memory.offload.parking, 0
    for each in (seq, *seq.followers):
        length = parking.parked(each.seq_id).table.physical_len
        peak = length + (1 if seq.followers else seq.next_chunk)
        if each.footprint.bounded:
            peak = max(peak, min(each.max_len, each.footprint.decode_cap))
        growth += blocks_for(peak, size) - blocks_for(length, size)
    if _becomes_own(seq):
        for each in seq.followers:
            growth += len(parking.parked(each.seq_id).held)
        if not seq.account.compactions:
            growth += memory.num_shared(match) + parking.num_coming(seq.seq_id, match)
    others = [each.seq_id for each in seq.followers]
    return (parking.num_to_resume(seq.seq_id, match, others) + growth) * size


def _copied_at_first_pass(seq: ScheduledSequence, held: int, memory: MemoryManager) -> int:
    """Blocks that its first pass takes at this size, because it writes no shared blocks."""
    if seq.account.compactions or not _becomes_own(seq):
        return 0
    kept = blocks_for(seq.footprint.kept(seq.footprint.decode_cap), memory.block_size)
    return max(0, kept - (held - memory.num_shared_of(seq.seq_id)))


def known_growth(running: Iterable[ScheduledSequence], memory: MemoryManager, *, prompts: bool) -> int:
    """Slots that running sequences will certainly take: up to and including the next pass, after which blocks
    are freed. Admitting into them would only cause a preemption.

    prompts: include uncomputed prompts: with several tenants, not the last admission would be preempted for
             them
    """
    size, growth = memory.block_size, 0
    for seq in running:
        peak = min(seq.max_len, seq.footprint.decode_cap) if seq.footprint.bounded else 0
        if prompts and seq.is_prefill:
            peak = max(peak, seq.footprint.slots_needed(seq.num_prompt, len(seq.token_ids)))
        if peak:
            table = memory.table(seq.seq_id)
            held = len(table.block_ids)
            more = max(0, blocks_for(peak, size) - held)
            growth += (more + _copied_at_first_pass(seq, held + more, memory)) * size
            if seq.footprint.windows:
                chunk = None if seq.is_prefill else 1
                in_windows = memory.num_blocks(seq.seq_id) - table.num_blocks
                growth += max(0, seq.footprint.window_slots(peak, chunk) - in_windows * size)
    return growth


class Admission(Generic[Seq]):
    """Starts waiting sequences in turn (Queue, FairShare) while there is room."""

    def __init__(self, state: SchedulerContext[Seq], preemptor: Preemptor[Seq]) -> None:
        self.state = state
        self.preemptor = preemptor
        recurrent = state.memory.recurrent
        self.in_flight = InFlight(state) if recurrent is None else InFlightStates(state, recurrent)

    def all(self, step: StepPlanBuilder[Seq]) -> None:
        """Start waiting sequences in turn while there are blocks, seats and tokens for them."""
        state = self.state
        self.in_flight.begin_step()
        if not state.waiting.tenants:
            return
        if state.waiting.order is not None and step.shares is None and self._num_seats_left <= 0:
            return  # no lookups needed
        state.waiting.begin_step()
        while not (step.pressed or step.failed) and step.budget > 0:
            seq = state.waiting.next(step.num_running, step.skipped, step.deferred)
            if seq is None or (step.refused and seq.priority > step.refused[0].priority):
                break
            if state.must_wait(seq):
                step.deferred.add(seq.seq_id)
                continue
            try:
                if self.in_flight.must_wait(seq):
                    step.deferred.add(seq.seq_id)
                elif not step.token_budget(seq):
                    step.skipped.add(seq.tenant)
                elif self._admit(seq, step):
                    for refused in step.refused:
                        state.waiting.line(refused.tenant).passed += 1
                elif not self._may_pass(seq, step):
                    break
            except Exception as error:
                state.fail(seq, step, error)

    def hold_back(self, step: StepPlanBuilder[Seq], shares: FairShare[Seq]) -> None:
        """Postpone the first tokens of a tenant's new sequences to the end of the step if another tenant
        would decode more tokens than these have, or half a part of the seats."""
        state = self.state
        ids = {one.seq_id for one in step.admitted}
        begun = [seq for seq in state.running if seq.seq_id in ids]
        counts = Counter(seq.tenant for seq in begun)
        new = {tenant for tenant, count in counts.items() if shares.num_running(tenant) == count}
        first = [seq for seq in begun if seq.tenant in new]
        if not first:
            return
        rows = (step.rows[seq.seq_id][0] for seq in first if seq.seq_id in step.rows)
        most = max(shares.seats // 2, sum(row.num_tokens for row in rows))
        least, counts = max(seq.priority for seq in first), Counter()
        for seq in state.running:
            if seq.tenant not in new and seq.seq_id in step.rows and seq.priority >= least:
                counts[seq.tenant] += 1
                if counts[seq.tenant] > most and not seq.is_prefill:
                    step.postpone(seq.seq_id)

    def _may_pass(self, seq: Seq, step: StepPlanBuilder[Seq]) -> bool:
        """Whether other tenants' sequences may start although there is no room for this one, which is next:
        only a limited number of times, unless its own tenant causes the shortage."""
        state = self.state
        line = state.waiting.line(seq.tenant)
        if step.shares is None or step.tokens is None:
            return False
        step.skipped.add(seq.tenant)
        step.tokens.forget_waiting(seq.tenant)
        if step.shares.fills_itself(seq):
            return True
        step.refused.append(seq)
        return line.passed < state.max_num_seqs

    def _admit(self, seq: Seq, step: StepPlanBuilder[Seq]) -> bool:
        """Start a waiting sequence. Returns: whether there was room, or others were preempted."""
        state = self.state
        shares = step.shares
        has_seat = shares.has_seat(seq) if shares is not None else self._has_seat(seq)
        if not has_seat and (shares is None or not shares.may_ask_for_seat(seq)):
            return False
        if has_seat and (snapshot := state.snapshot(seq)) is not None:
            return self._begin_as_fork(seq, snapshot, step)
        parking = state.memory.offload.parking
        parked, match = state.is_parked(seq), state.match(seq)
        own, with_prompts = own_slots(seq, match, state.memory), shares is not None

        def needed(running: Iterable[Seq]) -> int:
            return own + known_growth(running, state.memory, prompts=with_prompts)

        fits = has_seat and state.memory.can_admit(match, needed(state.running))
        while has_seat and not fits and state.snapshots.evict_one():
            match = state.match(seq)
            fits = state.memory.can_admit(match, needed(state.running))
        if parked and not fits and not state.running:
            return self._admit_anew(seq, step)
        if not fits:
            victims = shares.victims(seq, match, needed) if shares is not None else []
            if not victims:
                return False
            for victim in (seq for seq in victims if seq.status is Status.RUNNING):
                self.preemptor.preempt([victim], seq, "fairness", step)
            match = state.match(seq)  # victims may have taken host slots
        if parked:
            if seq.followers:
                self._begin_all_again(seq, match, step)
                return True
            parking.resume(seq.seq_id, match)
        else:
            state.memory.admit(seq.seq_id, match, priority=seq.priority)
            seq.num_computed, seq.stops = match.num_tokens, state.memory.stops(seq.seq_id)
            self.in_flight.begun(seq)
        num_loaded = len(match.lower) * state.memory.block_size
        self._begin(seq, Admitted(seq.seq_id, match.num_tokens, num_loaded, parked), step)
        return True

    def _admit_anew(self, seq: Seq, step: StepPlanBuilder[Seq]) -> bool:
        """Recompute sequences that fit into no pool together with those that share their blocks: recomputed,
        they are no larger than at their first admission."""
        for each in (seq, *seq.followers):
            self.state.memory.offload.parking.drop_parked(each.seq_id)
            each.reset()
        return self._admit(seq, step)

    def _begin_all_again(self, seq: Seq, match: PrefixMatch, step: StepPlanBuilder[Seq]) -> None:
        """Resume sequences of one group in one step; the pool has room for them. Those without tokens in this
        step, and those that only wait for the others, continue later."""
        followers, seq.followers, seq.seats = seq.followers, [], 1
        self.state.waiting.begin(seq)
        for each in (seq, *followers):
            match = self.state.match(each) if each is not seq else match
            self.state.memory.offload.parking.resume(each.seq_id, match)
            self._run(each, Admitted(each.seq_id, match.num_tokens, resumed=True), step, most=1)

    def _begin_as_fork(self, seq: Seq, snapshot: Seq, step: StepPlanBuilder[Seq]) -> bool:
        """Start a waiting sequence from a snapshot. Returns: whether there was room."""
        state = self.state
        size, shares, parked = state.memory.block_size, step.shares, state.is_parked(snapshot)

        def fits() -> bool:
            slots = slots_of_fork(seq, snapshot, state.memory)
            slots += known_growth(state.running, state.memory, prompts=shares is not None)
            has_place = not parked or state.snapshots.may_unpark()
            return has_place and blocks_for(slots, size) <= state.memory.num_free

        while not fits():
            if not state.snapshots.evict_one(snapshot):
                if not state.running:  # it would hold its own snapshot's room for ever
                    state.snapshots.drop(snapshot.snapshot_key)
                    return self._admit(seq, step)
                return False
        if parked:
            parking = state.memory.offload.parking
            parking.resume(snapshot.seq_id, parking.match_parked(snapshot.seq_id))
        state.snapshots.begin(snapshot, seq)
        num_loaded = seq.num_computed if parked else 0
        begun = Admitted(seq.seq_id, seq.num_computed, num_loaded, snapshot=snapshot.seq_id, unparked=parked)
        self._begin(seq, begun, step)
        return True

    def _begin(self, seq: Seq, begun: Admitted, step: StepPlanBuilder[Seq]) -> None:
        """Dequeue a sequence that has its blocks, and compute its next tokens."""
        self.state.waiting.begin(seq)
        self._run(seq, begun, step, most=seq.next_chunk)

    def _run(self, seq: Seq, begun: Admitted, step: StepPlanBuilder[Seq], *, most: int) -> None:
        """most: tokens that have blocks"""
        state = self.state
        state.end_loading(seq)
        room = step.token_budget(seq)
        state.running.append(seq)
        state.clock += 0 if begun.resumed else min(begun.num_hit, seq.num_prompt)
        seq.status, seq.last_step = Status.RUNNING, state.num_steps
        step.admitted.append(begun)
        if num_tokens := seq.chunk_of(min(room, most), min(step.budget, most)):
            state.compute(seq, num_tokens, step)

    def _has_seat(self, seq: Seq) -> bool:
        return seq.seats <= self._num_seats_left

    @property
    def _num_seats_left(self) -> int:
        return self.state.max_num_seqs - sum(other.seats for other in self.state.running)
