"""Fair shares of tenants: seats, blocks, prompt tokens of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.schedule.preemption_cost import VictimOrder, choose_victims
from kvreclaim.schedule.queue import Seq, Tenant
from kvreclaim.schedule.sequence import ScheduledSequence

FRACTION = 32
"""Least part of a step for a tenant's prompts, however short another tenant's are."""


class FairShare(Generic[Seq]):
    """Equal parts of seats and blocks, while several tenants run or wait.

    A tenant may exceed its part while the rest is unused. When another tenant's sequence waits that stays
    within its own part, the tenant furthest above its part is preempted: starting with its last admission,
    never entirely (a group that runs together counts as one), and only for a sequence that is at least as
    important.
    A preempted sequence is above its tenant's part, so it resumes without displacing others, and the first of
    each tenant always progresses.

    running: all that run, in the order of admission; the scheduler's own list
    seats, blocks: a tenant's part
    """

    def __init__(
        self, memory: MemoryManager, running: list[Seq], num_tenants: int, max_num_seqs: int
    ) -> None:
        self.seats = max(1, max_num_seqs // num_tenants)
        self.blocks = memory.num_pool_blocks // num_tenants
        self._memory = memory
        self._running = running
        self._max_num_seqs = max_num_seqs

    def num_running(self, tenant: Tenant) -> int:
        return sum(seq.tenant == tenant for seq in self._running)

    def has_seat(self, seq: Seq) -> bool:
        """Whether there is a free seat. Seats kept for future forks are unavailable to their own tenant and
        to tenants that have their part; forks that find none wait."""
        if kept_seats(self._running) + seq.kept_seats > self._max_num_seqs:
            return False
        every = sum(other.seats for other in self._running) + seq.seats
        return every <= self._max_num_seqs or self.may_ask_for_seat(seq)

    def may_ask_for_seat(self, seq: Seq) -> bool:
        """Whether other sequences are preempted if there is none."""
        own = kept_seats(other for other in self._running if other.tenant == seq.tenant)
        return own + seq.kept_seats <= self.seats and not self.fills_itself(seq)

    def fills_itself(self, seq: Seq) -> bool:
        """Whether its own tenant's sequences leave no room for it and its forks."""
        own = sum(other.seats for other in self._running if other.tenant == seq.tenant)
        return own + seq.seats > self._max_num_seqs

    def largest(self, order: VictimOrder, needy: Seq) -> list[Seq]:
        """Choose the group to preempt when a running sequence needs blocks: among the least important, except
        the first of them, which always progresses; of the tenant that holds most blocks, by the victim
        order."""
        least = max(seq.priority for seq in self._running)
        candidates = [seq for seq in self._running if seq.priority == least]
        candidates = candidates[1:] or candidates
        tenants = dict.fromkeys(seq.tenant for seq in candidates)
        tenant = max(tenants, key=lambda tenant: self._held(tenant, candidates))
        return choose_victims(order, (seq for seq in candidates if seq.tenant == tenant), needy)

    def victims(self, seq: Seq, match: PrefixMatch, needed: Callable[[Iterable[Seq]], int]) -> list[Seq]:
        """Choose the sequences to preempt so that this one can start; empty if that would not suffice.

        needed: slots to be free next to the match's blocks while these run
        """
        rest, gone = list(self._running), []
        released, freed = Counter[int](), 0
        hits, spare, size = (
            {*match.block_ids, *match.window_blocks},
            self._memory.num_spare(match),
            self._memory.block_size,
        )
        most = self._max_num_seqs - seq.kept_seats
        while (crowded := kept_seats(rest) > most) or blocks_for(needed(rest), size) > spare + freed:
            above = self._above_seats(seq, rest) if crowded else self._above_blocks(seq, rest)
            if not above:
                return []
            victim = _last(rest, max(above, key=above.__getitem__))
            rest.remove(victim)
            gone.append(victim)
            for block in self._memory.blocks(victim.seq_id):
                released[block] += 1
                freed += released[block] == self._memory.ref_count(block) and block not in hits
        return gone

    def _above_seats(self, seq: Seq, rest: list[Seq]) -> dict[Tenant, int]:
        """Tenants above their part of the seats, while this one's is below its own."""
        counts = Counter[Tenant]()
        for other in rest:
            counts[other.tenant] += other.kept_seats
        if counts[seq.tenant] + seq.kept_seats > self.seats:
            return {}
        units = _num_units(rest)
        least = {other.tenant for other in rest if other.priority >= seq.priority}
        may = [each for each in least if units[each] > 1]
        return {each: counts[each] for each in may if counts[each] > self.seats}

    def _above_blocks(self, seq: Seq, rest: list[Seq]) -> dict[Tenant, int]:
        """Tenants above their part of the blocks, while this one's would not be."""
        known = len(seq.token_ids)
        slots = seq.footprint.slots_needed(seq.num_prompt, known) + seq.footprint.window_slots(known)
        if self._held(seq.tenant, rest) + blocks_for(slots, self._memory.block_size) > self.blocks:
            return {}
        counts = _num_units(rest)
        least = {other.tenant for other in rest if other.priority >= seq.priority}
        may = [each for each in least if each != seq.tenant and counts[each] > 1]
        held = {each: self._held(each, rest) for each in may}
        return {each: num_held for each, num_held in held.items() if num_held > self.blocks}

    def _held(self, tenant: Tenant, running: list[Seq]) -> int:
        """Blocks of a tenant, each counted once; computed only if they may exceed its part."""
        ids, memory = [seq.seq_id for seq in running if seq.tenant == tenant], self._memory
        most = sum(map(memory.num_blocks, ids))
        return most if most <= self.blocks else len(set().union(*map(memory.blocks, ids)))


class PromptTokens:
    """Prompt tokens of each tenant in a step, while several tenants have some: as many as the tenant with
    fewest, so that a first token waits for little more than its own tenant's work; at least a minimum, and at
    most equal parts.

    running, waiting: sequences with unfinished prompts, and those that may start in this step
    budget:           of all of them
    least:            minimum of any tenant, however short the prompts of another are
    pending:          tokens to compute, by tenant
    """

    def __init__(self, running: Iterable[Seq], waiting: Iterable[Seq], budget: int, *, least: int) -> None:
        self._running = Counter[Tenant]()
        for seq in running:
            self._running[seq.tenant] += seq.num_uncomputed
        self.pending = self._running.copy()
        for seq in waiting:
            self.pending[seq.tenant] += seq.num_uncomputed
        self._budget = budget
        self._least = least
        self._taken = Counter[Tenant]()

    def left(self, tenant: Tenant) -> int:
        """Tokens left for prompts of this tenant."""
        num_tenants = max(1, len(self.pending))
        part = max(1, self._budget // num_tenants)
        if num_tenants > 1:
            part = min(part, max(self._least, min(self.pending.values())))
        return max(0, part - self._taken[tenant])

    def left_to_begin(self, tenant: Tenant) -> int:
        """Tokens left for a waiting prompt of this tenant, after its running ones."""
        return max(0, self.left(tenant) - self._running[tenant])

    def take(self, tenant: Tenant, num_tokens: int) -> None:
        self._taken[tenant] += num_tokens

    def forget_waiting(self, tenant: Tenant) -> None:
        """Remove the waiting sequences of a tenant without room."""
        self.pending[tenant] = self._running[tenant] + self._taken[tenant]
        if not self.pending[tenant]:
            del self.pending[tenant]


def _last(running: list[Seq], tenant: Tenant) -> Seq:
    """The least important sequence of a tenant, of equals the last admitted."""
    own = [(seq.priority, place) for place, seq in enumerate(running) if seq.tenant == tenant]
    return running[max(own)[1]]


def kept_seats(running: Iterable[ScheduledSequence]) -> int:
    """Seats reserved for forks."""
    return sum(seq.kept_seats for seq in running)


def _num_units(running: Iterable[ScheduledSequence]) -> Counter[Tenant]:
    """Groups that are preempted together, by tenant."""
    units = {(seq.tenant, seq.first_id if seq.gang else seq.seq_id) for seq in running}
    return Counter(tenant for tenant, _ in units)
