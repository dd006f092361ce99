"""Settings of a simulated engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvreclaim.checks import check_int, require
from kvreclaim.memory.eviction import DEFAULT_ORDER
from kvreclaim.memory.groups.state_slots import StateSizes
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.offload import OffloadSlots
from kvreclaim.offload.plan.tiered_offload import NEVER, TieredOffload
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.preemption_cost import PreemptionCostModel
from kvreclaim.schedule.rates import Rates
from kvreclaim.schedule.scheduler import Scheduler
from kvreclaim.sim.content import Links, TraceMemory
from kvreclaim.sim.request import Simulated


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of every replica. As in EngineConfig, and:

    footprint:       of every request; its block_size and max_chunk are set here
    by_prompt:       a request's footprint by the length of its prompt, instead of footprint
    bytes_per_block: moved when a block goes to the host or comes back
    max_model_len:   that no sequence exceeds; None: whatever the pool can hold
    host_blocks:     0: nothing lies below the pool
    host_states:     of recurrent layers, behind prefixes in host_blocks; 0: no prefixes lie there
    leaps:           count decode steps in groups where that changes no count
    states:          slots of recurrent layers; None: the model has none
    spread:          due points differ between requests, as spread_compression makes them
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    footprint: Footprint = field(default_factory=Footprint)
    scheduling_policy: str = "fcfs"
    preemption_victim: str = "auto"
    preemption_mode: str = "auto"
    eviction_policy: str = DEFAULT_ORDER
    enable_prefix_caching: bool = True
    host_blocks: int = 0
    host_states: int = 0
    bytes_per_block: int = 0
    rates: Rates = field(default_factory=Rates)
    leaps: bool = True
    spread: bool = False
    by_prompt: Callable[[int], Footprint] | None = None
    states: StateSizes | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_int(name, getattr(self, name), 1)
        check_int("host_blocks", self.host_blocks, 0)
        require(
            self.footprint.block_size == self.block_size
            and self.footprint.max_chunk == self.max_num_batched_tokens,
            f"the footprint is made for blocks of {self.footprint.block_size} and steps of "
            f"{self.footprint.max_chunk} tokens, the engine has {self.block_size} and "
            f"{self.max_num_batched_tokens}; make both for the same.",
            "footprint",
        )
        require(
            not self.footprint.eviction_method.whole_blocks,
            "a policy that drops whole blocks is not simulated: which blocks go depends on scores, and so "
            "does what other sequences still hold of them; take one that compacts.",
            "compression",
        )

    def footprint_of(self, num_prompt: int) -> Footprint:
        """The footprint of a request with a prompt of this length."""
        return self.footprint if self.by_prompt is None else self.by_prompt(num_prompt)

    @property
    def evicts(self) -> bool:
        """Whether any request may be compressed."""
        return self.by_prompt is not None or self.footprint.eviction_method.evicts

    def memory(self, links: Links) -> MemoryManager:
        """An empty pool."""
        slots = partial(
            TieredOffload,
            num_host_slots=self.host_blocks,
            max_parked=self.host_blocks // 2,
            store_after=NEVER if self.states and not self.host_states else 1,
            num_host_states=self.host_states,
        )
        return TraceMemory(
            self.num_blocks,
            self.block_size,
            links,
            enable_prefix_caching=self.enable_prefix_caching,
            eviction_policy=self.eviction_policy,
            offload=slots if self.host_blocks else OffloadSlots,
            states=self.states,
        )

    def scheduler(self, memory: MemoryManager) -> Scheduler[Simulated]:
        """The engine's own."""
        return Scheduler(
            memory,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            policy=self.scheduling_policy,
            preemption=PreemptionCostModel(self.preemption_mode, self.bytes_per_block, self.rates),
            preemption_victim=self.preemption_victim,
        )
