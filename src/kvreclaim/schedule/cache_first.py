"""The order of the scheduling policy `cache`: who has most in the cache comes earlier, within a bound."""

from __future__ import annotations

from typing import Generic

from kvreclaim.schedule.queue import WINDOW, Seq
from kvreclaim.schedule.state import State

BOUND_STEPS = 8
"""Steps full of prompt tokens that a sequence comes earlier at most."""
AGING = 4
"""Measured on drawn traces (tests/sim/test_sim_order.py): at the same bound, 1 finds less where conversations
crowd a pool, and 8 lets cold ones wait longer."""


class CacheFirst(Generic[Seq]):
    """Order the waiting sequences in the order of arrival - aging * min(cached, credit), the least first,
    behind those that are more important. The clock counts the prompt tokens that have been processed,
    computed or found, so nobody is overtaken by what arrives more than aging * credit of these later.

    aging:  by how many tokens of the clock a cached token comes earlier
    credit: cached tokens that count at most

    A prompt is looked up again when the index has changed, WINDOW times a step at most.
    """

    def __init__(self, state: State[Seq], max_num_batched_tokens: int) -> None:
        self.state = state
        self.aging = AGING
        self.credit = BOUND_STEPS * max_num_batched_tokens // AGING
        self._left = WINDOW

    def begin_step(self) -> None:
        self._left = WINDOW

    def sorted(self, window: list[Seq]) -> list[Seq]:
        """These, the first one first."""
        version = self.state.memory.index_version
        for seq in window:
            if seq.cached_at_version != version and self._left:
                self._left -= 1
                seq.cached_at_version, seq.num_cached = version, self.state.num_cached(seq)
        return sorted(window, key=lambda seq: (seq.priority, self.key(seq), seq.rank))

    def key(self, seq: Seq) -> int:
        """Its place on the clock."""
        return seq.arrived_at - self.aging * min(seq.num_cached, self.credit)
