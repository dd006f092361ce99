"""A running sequence gives way: its seat and its blocks go, what they hold is kept if that is worth it."""

from __future__ import annotations

import logging
from typing import Generic

from kvreclaim.schedule.draft import Draft
from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.sequence import Status
from kvreclaim.schedule.state import State
from kvreclaim.schedule.step import Preempted, PreemptionReason
from kvreclaim.schedule.victims import Preemption, VictimOrder

logger = logging.getLogger(__name__)


class GivingWay(Generic[Seq]):
    """order: who gives way first; preemption: how those are brought back."""

    def __init__(self, state: State[Seq], order: VictimOrder, preemption: Preemption) -> None:
        self.state = state
        self.order = order
        self.preemption = preemption

    def victim(self) -> Seq:
        """Who gives way when one that runs needs blocks."""
        running = self.state.running
        places = range(len(running))
        return running[max(places, key=lambda place: (self.order(running[place], place), place))]

    def preempt(self, victim: Seq, needy: Seq, reason: PreemptionReason, step: Draft[Seq]) -> None:
        """Take a sequence's blocks and its seat for one that needs some, itself maybe."""
        state = self.state
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
            state.memory.pool.num_in_use,
            state.memory.pool.num_blocks,
            victim.num_computed,
            "bring back" if parked else "compute again",
        )
        state.running.remove(victim)
        if not parked:
            state.memory.free(victim.seq_id)
            victim.reset()
        victim.status = Status.WAITING
        state.waiting.add_back(victim)
        step.preempt(Preempted(victim.seq_id, reason, parked))

    def _park(self, victim: Seq, step: Draft[Seq]) -> bool:
        """Move what its blocks hold to slots, if that is wanted and there are some. Of one that has begun in
        this very step nothing is there yet; one that has come back in it just goes back."""
        tiers = self.state.tiers
        if tiers is None:
            return False
        begun = next((one for one in step.admitted if one.seq_id == victim.seq_id), None)
        if begun is not None:
            return begun.resumed and tiers.park(victim.seq_id)
        return self.preemption.swaps(victim, tiers) and tiers.park(victim.seq_id)
