"""Who gives way when a running sequence lacks blocks, and whether it keeps what its blocks hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvreclaim.checks import check_choice
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.tiers.manager import TieredMemory
from kvreclaim.schedule.rates import Rates
from kvreclaim.schedule.sequence import Sequence

PREEMPTION_MODES = ("auto", "swap", "recompute")
VICTIM_POLICIES = ("auto", "last", "priority", "lru", "cost")


@dataclass(slots=True, eq=False)
class Preemption:
    """How a sequence that gives way is brought back.

    mode:            auto: as is cheaper; swap: moved whenever there are slots; recompute: computed again
    bytes_per_block: moved for a block
    rates:           of this machine
    """

    mode: str = "auto"
    bytes_per_block: int = 0
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        check_choice("preemption_mode", self.mode, PREEMPTION_MODES)

    def swaps(self, seq: Sequence, memory: MemoryManager) -> bool:
        """Whether its blocks are to be moved to slots, if there are some."""
        if self.mode == "recompute" or not isinstance(memory, TieredMemory) or not seq.num_computed:
            return False
        return self.mode == "swap" or self.swap_s(seq, memory) < self.recompute_s(seq, memory)

    def swap_s(self, seq: Sequence, memory: TieredMemory) -> float:
        """Seconds to move it out and in: out only what no slot holds yet."""
        size, held = self.bytes_per_block, memory.table(seq.seq_id).num_blocks
        return self.rates.swap_s(memory.num_to_park(seq.seq_id) * size, held * size)

    def recompute_s(self, seq: Sequence, memory: MemoryManager) -> float:
        """Seconds to compute it again: of an exact one what will not be found, else all."""
        table = memory.table(seq.seq_id)
        found = 0
        if table.chain is not None and isinstance(memory, TieredMemory):
            found = min(memory.num_below(seq.seq_id) * memory.block_size, seq.hit_limit)
        return self.rates.recompute_s(seq.num_computed, found, seq.account.compactions)

    def back_s(self, seq: Sequence, memory: MemoryManager) -> float:
        """Seconds until it is back, the cheaper way that its mode allows."""
        again = self.recompute_s(seq, memory)
        if self.mode == "recompute" or not isinstance(memory, TieredMemory):
            return again
        moved = self.swap_s(seq, memory)
        return moved if self.mode == "swap" else min(moved, again)


VictimOrder = Callable[[Sequence, int], tuple[float, ...]]
"""Of two running sequences the one with the greater key gives way first; the number is its place in the order
of admission."""


def last_come(seq: Sequence, place: int) -> tuple[float, ...]:
    """Who was admitted last."""
    return (place,)


def lowest_priority(seq: Sequence, place: int) -> tuple[float, ...]:
    """The least important, and of these who arrived last."""
    return seq.rank


def least_recent(seq: Sequence, place: int) -> tuple[float, ...]:
    """Who has computed nothing for longest, and of these who was admitted last."""
    return -seq.last_step, place


@dataclass(frozen=True, slots=True, eq=False)
class LeastCost:
    """Who is back soonest, and of these who was admitted last."""

    preemption: Preemption
    memory: MemoryManager

    def __call__(self, seq: Sequence, place: int) -> tuple[float, ...]:
        return -self.preemption.back_s(seq, self.memory), place


_SIMPLE: Mapping[str, VictimOrder] = MappingProxyType(
    {"last": last_come, "priority": lowest_priority, "lru": least_recent}
)


def victim_order(
    name: str, *, by_priority: bool, preemption: Preemption, memory: MemoryManager
) -> VictimOrder:
    """auto: last, or priority where sequences run by priority. Raises: InvalidArgumentError."""
    check_choice("victim_policy", name, VICTIM_POLICIES)
    if name == "cost":
        return LeastCost(preemption, memory)
    return _SIMPLE[("priority" if by_priority else "last") if name == "auto" else name]
