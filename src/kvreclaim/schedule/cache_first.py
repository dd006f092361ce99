"""Scheduling policy `cache`: the sequence with most tokens in the cache comes earlier, within a bound."""

from __future__ import annotations

from typing import Generic

from kvreclaim.schedule.queue import WINDOW, Seq
from kvreclaim.schedule.state import SchedulerContext

BOUND_STEPS = 8
"""Most steps full of prompt tokens by which a sequence comes earlier."""
AGING = 4
"""Measured on drawn traces (tests/sim/test_sim_order.py): at the same bound, 1 finds less when conversations
crowd a pool, and 8 makes cold ones wait longer."""


class CacheFirst(Generic[Seq]):
    """Order waiting sequences of equal importance by arrival - aging * min(cached, credit), ascending. The
    clock counts prompt tokens processed, computed or found, so a sequence is overtaken only by those that
    arrive within aging * credit tokens after it.

    aging:  clock tokens per cached token
    credit: most cached tokens that count

    A prompt is looked up again when the index has changed, at most WINDOW times a step.
    """

    def __init__(self, state: SchedulerContext[Seq], max_num_batched_tokens: int) -> None:
        self.state = state
        self.aging = AGING
        self.credit = BOUND_STEPS * max_num_batched_tokens // AGING
        self._left = WINDOW

    def begin_step(self) -> None:
        self._left = WINDOW

    def sorted(self, window: list[Seq]) -> list[Seq]:
        """Sort by the policy."""
        version = self.state.memory.index_version
        for seq in window:
            if seq.cached_at_version != version and self._left:
                self._left -= 1
                seq.cached_at_version, seq.num_cached = version, self.state.num_cached(seq)
        return sorted(window, key=lambda seq: (seq.priority, self.key(seq), seq.rank))

    def key(self, seq: Seq) -> int:
        """Position on the clock."""
        return seq.arrived_at - self.aging * min(seq.num_cached, self.credit)
