"""Prefixes in flight: a request waits for blocks that another one is computing."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Generic

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.sequence import Awaited, ScheduledSequence, Status
from kvreclaim.schedule.state import SchedulerContext

LEAST_SHARED = 64
MOST_WAITS = 8
MOST_STOPS = 2


class InFlight(Generic[Seq]):
    """A sequence does not start while a running one computes the next blocks of its prompt, or a prefix with
    a usable snapshot.

    It waits while that one progresses and its blocks will be found, at most until the whole shared prefix is
    there. A preemption, abort, failure or pass that ends this is seen in the next step, and a sequence waits
    at most MOST_WAITS times.

    least_tokens: least saving, counted from what is cached anyway
    num_waits:    begun so far; num_waiting: sequences that wait, by the last step
    """

    def __init__(self, state: SchedulerContext[Seq]) -> None:
        self.state = state
        self.least_tokens = LEAST_SHARED
        self.num_waits = self.num_waiting = 0

    def begin_step(self) -> None:
        self.num_waiting = 0

    def begun(self, owner: Seq) -> None:
        """Record a start without tokens yet."""

    def must_wait(self, seq: Seq) -> bool:
        """Whether the next sequence should start later."""
        if seq.awaits is None or not self._comes(seq.awaits):
            seq.awaits = self._find(seq) if seq.num_awaited < MOST_WAITS else None
            if seq.awaits is None:
                return False
            seq.num_awaited += 1
            self.num_waits += 1
        self.num_waiting += 1
        return True

    def _comes(self, awaited: Awaited) -> bool:
        """Whether the prefix is still being computed and will be found."""
        owner = awaited.owner
        if owner.num_computed >= awaited.num_tokens or not self._gets_on(owner):
            return False
        return awaited.as_snapshot or self.state.memory.publishes(owner.seq_id)

    def _gets_on(self, owner: ScheduledSequence) -> bool:
        return owner.status is Status.RUNNING and self.state.num_steps - owner.last_step <= 1

    def _find(self, seq: Seq) -> Awaited | None:
        """Find a prefix worth waiting for."""
        state = self.state
        if state.is_parked(seq):
            return None
        if seq.seeks_snapshot and state.snapshot(seq) is not None:
            return None
        return self._snapshot(seq) or self._blocks(seq)

    def _snapshot(self, seq: Seq) -> Awaited | None:
        at, size = seq.footprint.compress_prompt_at, self.state.memory.block_size
        if seq.snapshot_key is None or seq.num_computed:
            return None
        kept = blocks_for(seq.footprint.kept(at), size)
        if kept > self.state.snapshots.max_blocks or (
            seq.max_prefix_hit is not None and seq.max_prefix_hit < at
        ):
            return None
        for owner in self.state.running:
            is_found = owner.begun_with is None or seq.lineage is not None
            if owner.snapshot_key == seq.snapshot_key and is_found:
                awaited = Awaited(owner, at, as_snapshot=True)
                if self._comes(awaited):
                    return awaited
        return None

    def _blocks(self, seq: Seq) -> Awaited | None:
        """Find the longest prefix that a running sequence computes next and this one shares."""
        state, best, match = self.state, None, None
        size, known = state.memory.block_size, min(len(seq.token_ids) - 1, seq.hit_limit)
        for owner in state.running if known >= self.least_tokens else ():
            there = owner.num_computed // size * size
            if not owner.is_prefill or known - there < self.least_tokens:
                continue
            awaited = Awaited(owner, self._shared(seq, owner, known))
            if awaited.num_tokens - there < self.least_tokens or not self._comes(awaited):
                continue
            match = match or state.match(seq)
            if self._hits(match, there) and (best is None or awaited.num_tokens > best.num_tokens):
                best = awaited
        return best

    def _hits(self, match: PrefixMatch, there: int) -> bool:
        """Whether this match will hit what an owner computes, given the tokens it has computed."""
        return match.num_tokens == there

    def _shared(self, seq: Seq, owner: Seq, known: int) -> int:
        """Leading tokens in equal blocks that the owner will have computed in shareable form."""
        assert seq.keys is not None, f"sequence {seq.seq_id} was not added"
        assert owner.keys is not None, f"sequence {owner.seq_id} was not added"
        size = self.state.memory.block_size
        ends = owner.fork_at if owner.followers else len(owner.token_ids)
        most = min(known, owner.footprint.exact_until(owner.num_prompt, ends))
        return seq.keys.num_shared(owner.keys, most // size) * size


class InFlightStates(InFlight[Seq]):
    """Hits end at kept recurrent states, so a running sequence that others wait for keeps its state where
    they diverge. At its start it looks at the next waiting sequences for up to MOST_STOPS lengths, the most
    frequent ones."""

    def __init__(self, state: SchedulerContext[Seq], states: RecurrentGroup) -> None:
        super().__init__(state)
        self.states = states

    def begun(self, owner: Seq) -> None:
        if not self._keeps:
            return
        counts, least = Counter[int](), owner.num_computed + self.least_tokens
        others = (seq for seq in self.state.waiting if seq is not owner)
        for seq in islice(others, self.state.max_num_seqs):
            length = self._shared(seq, owner, min(len(seq.token_ids) - 1, seq.hit_limit))
            counts[length] += length >= least
        self._keep_at(owner, *(length for length, count in counts.most_common(MOST_STOPS) if count))

    def must_wait(self, seq: Seq) -> bool:
        waits = super().must_wait(seq)
        if seq.awaits is not None and not seq.awaits.as_snapshot:
            self._keep_at(seq.awaits.owner, seq.awaits.num_tokens)
        return waits

    def _blocks(self, seq: Seq) -> Awaited | None:
        return super()._blocks(seq) if self._keeps else None

    def _hits(self, match: PrefixMatch, there: int) -> bool:
        return match.num_indexed * self.state.memory.block_size >= there

    @property
    def _keeps(self) -> bool:
        return self.states.sizes.num_checkpoints > 0

    def _keep_at(self, owner: ScheduledSequence, *lengths: int) -> None:
        if new := set(lengths) - set(owner.stops):
            self.states.keep_at(owner.seq_id, *new)
            owner.stops = self.states.stops(owner.seq_id)
