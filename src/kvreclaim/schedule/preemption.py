"""Preemption of running sequences: frees seats and blocks; their content is kept if that is cheaper."""

from __future__ import annotations

import logging
from collections.abc import Sequence as ListLike
from itertools import islice
from typing import Generic

from kvreclaim.schedule.preemption_cost import PreemptionCostModel, VictimOrder, choose_victims
from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.sequence import Status
from kvreclaim.schedule.state import SchedulerContext, StepPlanBuilder
from kvreclaim.schedule.step import Preempted, PreemptionReason

logger = logging.getLogger(__name__)


class Preemptor(Generic[Seq]):
    """order: which group is preempted first; preemption: how it resumes."""

    def __init__(
        self, state: SchedulerContext[Seq], order: VictimOrder, preemption: PreemptionCostModel
    ) -> None:
        self.state = state
        self.order = order
        self.preemption = preemption

    def victims(self, needy: Seq) -> list[Seq]:
        """Return the group to preempt when a running sequence needs blocks."""
        return choose_victims(self.order, self.state.running, needy)

    def preempt(
        self, victims: ListLike[Seq], needy: Seq, reason: PreemptionReason, step: StepPlanBuilder[Seq]
    ) -> None:
        """Preempt sequences, given in the order of admission, for one that needs blocks, possibly itself. The
        last one goes first, so that the first one heads the queue."""
        if victims[0].gang:
            self._preempt_all(victims[0], needy, reason, step)
            return
        swaps = self.preemption.swaps(victims, self.state.memory)
        for victim in reversed(victims):
            self._preempt(victim, needy, reason, step, parked=self._park(victim, step, swaps=swaps))
            self.state.waiting.add_back(victim)

    def _preempt_all(
        self, victim: Seq, needy: Seq, reason: PreemptionReason, step: StepPlanBuilder[Seq]
    ) -> None:
        """Preempt a group: the first one waits for all. Either all keep their blocks' content, and resume in
        one step, or the common prefix is recomputed, and the others fork from it."""
        group = [seq for seq in self.state.running if seq.first_id == victim.first_id]
        first = min(group, key=lambda seq: seq.index)
        unborn = first.followers  # it was on its way to the fork
        parked = not unborn and self._park_all(group, step)
        for seq in reversed(group):
            self._preempt(seq, needy, reason, step, parked=parked)
        if len(group) > 1:
            first.followers = [seq for seq in group if seq is not first]
            first.seats = len(group)
            first.fork_at = common_length([seq.token_ids for seq in group])
        assert len(group) == 1 or not unborn, f"sequence {first.seq_id} runs next to its followers"
        self.state.waiting.add_back(first)

    def _preempt(
        self, victim: Seq, needy: Seq, reason: PreemptionReason, step: StepPlanBuilder[Seq], parked: bool
    ) -> None:
        state = self.state
        logger.info(
            "request %s (output %d, priority %d) is preempted for request %s (priority %d), reason %s: "
            "%d of %d blocks in use, %d tokens to %s",
            victim.request_id,
            victim.index,
            victim.priority,
            needy.request_id,
            needy.priority,
            reason,
            state.memory.num_in_use,
            state.memory.num_pool_blocks,
            victim.num_computed,
            "bring back" if parked else "compute again",
        )
        state.running.remove(victim)
        if not parked:
            state.memory.free(victim.seq_id)
            victim.reset()
        victim.status, victim.draft_ids = Status.WAITING, []
        step.preempt(Preempted(victim.seq_id, reason, parked))

    def _park_all(self, group: ListLike[Seq], step: StepPlanBuilder[Seq]) -> bool:
        """Park all of them, shared blocks once, or none. Returns: which."""
        swaps, parking = self.preemption.swaps(group, self.state.memory), self.state.memory.offload.parking
        if not all(self._is_worth_slots(seq, step, swaps=swaps) for seq in group):
            return False
        if not parking.can_park([seq.seq_id for seq in group]):
            return False
        for seq in group:
            has_slots = parking.park(seq.seq_id)
            assert has_slots, f"sequence {seq.seq_id} finds no slots, though there were some for all"
        return True

    def _park(self, victim: Seq, step: StepPlanBuilder[Seq], *, swaps: bool) -> bool:
        """Move its blocks to host slots, if that pays and there are some."""
        parking = self.state.memory.offload.parking
        return self._is_worth_slots(victim, step, swaps=swaps) and parking.park(victim.seq_id)

    @staticmethod
    def _is_worth_slots(victim: Seq, step: StepPlanBuilder[Seq], *, swaps: bool) -> bool:
        """A sequence started in this step holds nothing yet; one resumed in it just returns."""
        begun = next((one for one in step.admitted if one.seq_id == victim.seq_id), None)
        return swaps and victim.num_computed > 0 if begun is None else begun.resumed


def common_length(tokens: ListLike[ListLike[int]]) -> int:
    """Return the leading tokens common to all, fewer than the shortest has."""
    least = min(map(len, tokens)) - 1
    places = zip(*(islice(each, least) for each in tokens), strict=True)
    return next((place for place, each in enumerate(places) if len(set(each)) > 1), least)
