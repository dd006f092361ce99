"""Which sequences are preempted together when blocks are lacking, and whether their content is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from types import MappingProxyType

from kvreclaim.checks import check_choice
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.rates import Rates
from kvreclaim.schedule.sequence import ScheduledSequence

PREEMPTION_MODES = ("auto", "swap", "recompute")
VICTIM_POLICIES = ("auto", "last", "priority", "lru", "cost")


@dataclass(slots=True, eq=False)
class PreemptionCostModel:
    """How sequences that are preempted together resume.

    mode:            auto: the cheaper way; swap: moved whenever there are slots; recompute: recomputed
    bytes_per_block: moved for a block
    rates:           of this machine
    """

    mode: str = "auto"
    bytes_per_block: int = 0
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        check_choice("preemption_mode", self.mode, PREEMPTION_MODES)

    def measure(self, bytes_per_block: int) -> None:
        self.bytes_per_block = bytes_per_block

    def swaps(self, group: Group, memory: MemoryManager) -> bool:
        """Whether their blocks are moved to host slots, if there are some."""
        if self.mode == "recompute" or not memory.offload.num_slots:
            return False
        return self.mode == "swap" or self.swap_s(group, memory) < self.recompute_s(group, memory)

    def swap_s(self, group: Group, memory: MemoryManager) -> float:
        """Seconds to move them out and in, shared blocks once; blocks that are in a slot need no move out."""
        size, ids = self.bytes_per_block, [seq.seq_id for seq in group]
        held = {block for seq_id in ids for block in memory.table(seq_id).blocks()}
        return self.rates.swap_s(memory.offload.parking.num_to_park(ids) * size, len(held) * size)

    def recompute_s(self, group: Group, memory: MemoryManager) -> float:
        """Seconds to recompute them: for exact ones only what will not be found, including blocks of the
        first one; otherwise all."""
        total, computed = 0.0, set[int | None]()
        for seq in group:
            table = memory.table(seq.seq_id)
            found = 0
            if table.chain is not None:
                ids = table.block_ids[: len(table.entries)] if len(group) > 1 else []
                found = next((i for i, block in enumerate(ids) if block not in computed), len(ids))
                found = max(found, memory.offload.num_below(seq.seq_id))
                computed.update(ids)
            found = min(found * memory.block_size, seq.hit_limit, seq.num_computed)
            total += self.rates.recompute_s(seq.num_computed, found, seq.account.compactions)
        return total

    def back_s(self, group: Group, memory: MemoryManager) -> float:
        """Seconds to resume, by the cheaper way that the mode allows."""
        again = self.recompute_s(group, memory)
        if self.mode == "recompute" or not memory.offload.num_slots:
            return again
        moved = self.swap_s(group, memory)
        return moved if self.mode == "swap" else min(moved, again)


Group = ListLike[ScheduledSequence]
"""Running sequences that are preempted together, in the order of admission."""

VictimOrder = Callable[[Group, int], tuple[float, ...]]
"""The group with the greater key is preempted first; the number is the index of its last sequence in the
order of admission."""


def choose_victims(order: VictimOrder, running: Iterable[Seq], needy: ScheduledSequence) -> list[Seq]:
    """Choose the group to preempt for a sequence that needs blocks, in the order of admission.

    The outputs of a request are preempted together: one alone frees only its unshared blocks. Those of the
    needy sequence's own request, itself included, are preempted one by one.
    """
    groups: dict[tuple[str, int | None], list[Seq]] = {}
    places: dict[tuple[str, int | None], int] = {}
    for place, seq in enumerate(running):
        name = seq.request_id, seq.seq_id if seq.request_id == needy.request_id else None
        groups.setdefault(name, []).append(seq)
        places[name] = place
    return groups[max(groups, key=lambda name: (order(groups[name], places[name]), places[name]))]


def last_come(group: Group, place: int) -> tuple[float, ...]:
    """Preempt the group whose last sequence was admitted last."""
    return (place,)


def lowest_priority(group: Group, place: int) -> tuple[float, ...]:
    """Preempt the least important group, of equals the last to arrive."""
    return max(seq.rank for seq in group)


def least_recent(group: Group, place: int) -> tuple[float, ...]:
    """Preempt the group that was computed least recently; of equals the one admitted last."""
    return -max(seq.last_step for seq in group), place


@dataclass(frozen=True, slots=True, eq=False)
class LeastCost:
    """Preempt the group that resumes fastest; of equals the one admitted last."""

    preemption: PreemptionCostModel
    memory: MemoryManager

    def __call__(self, group: Group, place: int) -> tuple[float, ...]:
        return -self.preemption.back_s(group, self.memory), place


_SIMPLE: Mapping[str, VictimOrder] = MappingProxyType(
    {"last": last_come, "priority": lowest_priority, "lru": least_recent}
)


def victim_order(
    name: str, *, by_priority: bool, preemption: PreemptionCostModel, memory: MemoryManager
) -> VictimOrder:
    """Resolve auto: priority under priority scheduling, else last. Raises: InvalidArgumentError."""
    check_choice("preemption_victim", name, VICTIM_POLICIES)
    if name == "cost":
        return LeastCost(preemption, memory)
    return _SIMPLE[("priority" if by_priority else "last") if name == "auto" else name]
