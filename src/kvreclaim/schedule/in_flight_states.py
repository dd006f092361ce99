"""Prefixes in flight of models with recurrent layers."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.schedule.in_flight import InFlight
from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.sequence import Awaited, ScheduledSequence
from kvreclaim.schedule.state import SchedulerContext

MOST_STOPS = 2


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
