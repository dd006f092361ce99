"""All that an engine has below its pool, and when it is its turn in a step."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvreclaim.engine.extension import Extension
from kvreclaim.engine.offload.disk import WAIT_S, Disk
from kvreclaim.engine.offload.image import Parking
from kvreclaim.engine.offload.moves import Moves
from kvreclaim.engine.offload.prefixes import Prefixes
from kvreclaim.engine.offload.states import OffloadedStates
from kvreclaim.engine.offload.stats import DiskStateStats, DiskStats, HostStateStats, SlotStats, TierStats
from kvreclaim.engine.request.outputs import EngineTotals, StepStats
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.prefix.index import BlockKeys
from kvreclaim.offload.plan.tiered_offload import TieredOffload
from kvreclaim.offload.store.host import HostSlots
from kvreclaim.offload.store.slot_file import SlotFile
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.schedule import Admitted, StepPlan
from kvreclaim.schedule.preemption_cost import PreemptionCostModel

NO_SEQUENCE = -2
"""Sequence id for blocks that are read from disk without a sequence."""

logger = logging.getLogger(__name__)

MEASURED_TOKENS = 64
"""Steps with fewer prompt tokens are not used to measure the cost of a token."""


class Offload(Extension):
    """Host slots, the slot file on disk, the side state of parked sequences, and transfer costs.

    disk: None without a file; prefixes: compressed prefixes in files, None without
    """

    rank = 20

    def __init__(
        self,
        memory: MemoryManager,
        offload: TieredOffload,
        cache: KVCache,
        signals: Signals,
        preemption: PreemptionCostModel,
        file: SlotFile | None,
        totals: EngineTotals,
    ) -> None:
        self.memory, self.below, self.preemption, self.totals = memory, offload, preemption, totals
        slots = HostSlots(cache.planes, offload.num_slots)
        preemption.measure(slots.bytes_per_slot)
        self.parking = Parking(memory, cache, signals)
        self.moves = Moves(offload, slots, signals, preemption.rates)
        self.disk: Disk | None = None
        if file is not None:
            assert offload.disk is not None, "there is a file, so there is a tier"
            self.disk = Disk(offload.disk, slots.view, file, preemption.rates)
        self.states: OffloadedStates | None = None
        self.disks: tuple[Disk, ...] = () if self.disk is None else (self.disk,)
        """The one of blocks, then the one of states."""
        self.prefixes: Prefixes | None = None

    def keep_states(self, states: OffloadedStates, file: SlotFile | None) -> None:
        """States of recurrent layers lie on the host, and in this file."""
        self.states = states
        if file is not None:
            assert self.below.states_on_disk is not None, "there is a file, so there is a tier"
            disk = Disk(self.below.states_on_disk, states.view, file, self.preemption.rates, chained=False)
            self.disks = (*self.disks, disk)

    def keep_files(self, prefixes: Prefixes) -> None:
        """Compressed prefixes are kept on disk, too."""
        self.prefixes = prefixes

    def added(self) -> None:
        self.submit()

    def submit(self) -> None:
        """Begin to read blocks that a new request would hit on disk."""
        for disk in self.disks:
            disk.submit()
        if self.prefixes is not None:
            self.prefixes.submit()

    def begin_step(self) -> None:
        """Take in finished reads from disk."""
        self._poll()
        if self.prefixes is not None:
            self.prefixes.poll()

    def _poll(self) -> None:
        for disk in self.disks:
            disk.poll()
        if self.below.on_disk is not None:
            self.below.on_disk.settle()

    def prepare(self, plan: StepPlan) -> None:
        """Move the plan's blocks out and in."""
        if plan.swap_out:
            self.moves.out(plan.swap_out)
        if plan.swap_in:
            self.moves.load(plan.swap_in)

    def preempted(self, seq: Sequence, *, parked: bool) -> None:
        if parked:
            self.parking.park(seq)

    def admitted(self, seq: Sequence, begun: Admitted) -> None:
        if begun.resumed:
            self.parking.resume(seq)
        metrics = seq.request.metrics
        if metrics.queue_s is None:  # for the first time
            metrics.num_disk_tokens = self.below.num_from_disk(begun.seq_id)

    def lost(self, seq: Sequence) -> None:
        self.below.parking.drop_parked(seq.seq_id)

    def reset(self, seq_id: int) -> None:
        self.parking.drop(seq_id)

    def released(self, seq_id: int) -> None:
        self.parking.drop(seq_id)

    def idle(self) -> bool:
        """Wait for the disk, if something is on its way from there."""
        self.submit()
        for disk in self.disks:
            if disk.tier.num_loading:
                disk.wait()
                return True
        if self.prefixes is not None and self.prefixes.below.num_coming:
            self.prefixes.workers.wait(WAIT_S)
            return True
        return False

    def load_now(self) -> None:
        """Carry out the memory's loads outside of a step."""
        self.moves.load(self.below.pop_moves_in())

    def bring_up(self, keys: BlockKeys) -> None:
        """Read the blocks of these keys that only the disk has, and wait for them."""
        if self.disk is None:
            return
        self.below.prefetch(NO_SEQUENCE, keys, keys.num_tokens - 1)
        self.submit()
        while self.below.must_wait(NO_SEQUENCE):
            for disk in self.disks:
                if disk.tier.num_loading:
                    disk.wait()
            self._poll()
        self.below.end_loading(NO_SEQUENCE)

    def computed(self, sequences: list[Sequence]) -> None:
        self.store()

    def store(self) -> None:
        """Blocks that have become full go to the host, and from there to disk."""
        try:
            self.moves.store()
        except Exception:
            logger.exception("storing blocks on the host failed; later requests compute them again")
        if self.disk is not None and self.disk.workers.takes_stores:
            self.below.stored()
        if self.prefixes is not None:
            self.prefixes.flush()
        self.submit()

    def end_step(self, stats: StepStats) -> None:
        """Learn what computing costs here, from steps that are mostly prompts."""
        rates, totals = self.preemption.rates, self.totals
        if stats.num_prefill_tokens >= MEASURED_TOKENS and stats.num_decode_tokens < MEASURED_TOKENS // 4:
            rates.note("token_s", stats.elapsed_s, stats.num_prefill_tokens)
        if totals.compactions:
            rates.pass_s = (totals.score_s + totals.compact_s) / totals.compactions

    def stats(self) -> TierStats:
        """Return counts of every tier, current and since the start."""
        self.begin_step()  # an idle engine takes in no finished transfers otherwise
        below, prefixes = self.below, self.prefixes
        parking, counts = below.parking, below.counts
        return TierStats(
            host=SlotStats.of(below.host.pool),
            moves=replace(self.moves.totals),
            parked_seqs=parking.num_parked,
            parked_slots=parking.num_parked_slots,
            swaps=self.totals.swaps,
            swap_in_bytes=parking.num_resumed_blocks * self.preemption.bytes_per_block,
            deferred_seqs=(0 if below.on_disk is None else below.on_disk.num_deferred)
            + (0 if prefixes is None else prefixes.below.num_deferred),
            asked_tokens=counts.asked,
            host_hit_tokens=counts.from_host,
            disk_hit_tokens=counts.from_disk,
            refused=below.prefixes.num_unstored,
            bytes_per_block=self.preemption.bytes_per_block,
            disk=self._disk_stats(),
            prefixes=None if prefixes is None else prefixes.stats(),
            states=None if below.states is None else HostStateStats.of(below.states),
        )

    def _disk_stats(self) -> DiskStats | None:
        below = self.below
        if self.disk is None or below.disk is None:
            return None
        states = None
        if below.states_on_disk is not None:
            of_states = self.disks[-1]
            states = DiskStateStats.of(below.states_on_disk, of_states.counters, of_states.num_recovered)
        return DiskStats.of(below.disk, self.disk.counters, self.disk.num_recovered, states)

    def reset_prefixes(self, *, external: bool) -> None:
        """Forget every prefix; external: below the pool, too."""
        self.memory.reset_prefix_cache(external=external)
        if external and self.prefixes is not None:
            self.prefixes.reset()
        self.submit()

    @property
    def is_clearing(self) -> bool:
        """Whether forgotten records may still be on disk."""
        prefixes = self.prefixes
        is_clearing = any(disk.workers.is_clearing for disk in self.disks)
        return is_clearing or (prefixes is not None and prefixes.workers.is_clearing)

    def close(self) -> None:
        """Finish writes to disk, and release the file."""
        if self.prefixes is not None:
            self.prefixes.close()
        if self.states is not None:
            self.states.flush()
        for disk in self.disks:
            disk.submit()
            disk.close()
