"""Statistics of the tiers."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.engine.offload.moves import MoveTotals
from kvreclaim.memory.pool import BlockPool
from kvreclaim.offload.plan.disk import DiskTier
from kvreclaim.offload.plan.states import DiskStates, HostStates
from kvreclaim.offload.store.jobs import DiskCounters
from kvreclaim.offload.store.prefix_workers import PrefixCounters


@dataclass(frozen=True, slots=True)
class SlotStats:
    """Slots of a tier; in_use + cached + free = num_slots. evictions: cached ones used for something else."""

    num_slots: int
    in_use: int
    cached: int
    free: int
    evictions: int

    @classmethod
    def of(cls, pool: BlockPool) -> SlotStats:
        free = pool.num_free - pool.num_cached
        return cls(pool.num_blocks, pool.num_in_use, pool.num_cached, free, pool.num_evictions)


@dataclass(frozen=True, slots=True)
class DiskStateStats:
    """Counts of recurrent layers' states on disk.

    kept: can be read; recovered: found at the start
    stored, loaded: written and read since then; gone: damaged; failed: transfers with a disk error
    loading, storing: pending
    """

    counters: DiskCounters
    num_slots: int
    kept: int
    recovered: int
    stored: int
    loaded: int
    gone: int
    failed: int
    loading: int
    storing: int

    @classmethod
    def of(cls, states: DiskStates, counters: DiskCounters, recovered: int) -> DiskStateStats:
        return cls(
            counters,
            states.slots.num_slots,
            len(states.slots),
            recovered,
            states.num_stored,
            states.num_loaded,
            states.num_gone,
            states.num_failed,
            states.num_loading,
            states.num_storing,
        )


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counts of the disk file.

    blocks_loaded, blocks_stored: can be found since then
    recovered: found at the start
    gone:    loads with other or damaged bytes in their slot
    failed:  transfers with a disk error
    refused: stores without a free slot
    loading, storing: pending
    states: of recurrent layers, after these blocks; None without
    """

    slots: SlotStats
    counters: DiskCounters
    recovered: int
    blocks_loaded: int
    blocks_stored: int
    gone: int
    failed: int
    refused: int
    loading: int
    storing: int
    states: DiskStateStats | None = None

    @classmethod
    def of(
        cls, tier: DiskTier, counters: DiskCounters, recovered: int, states: DiskStateStats | None
    ) -> DiskStats:
        return cls(
            slots=SlotStats.of(tier.tier.pool),
            counters=counters,
            recovered=recovered,
            blocks_loaded=tier.num_loaded,
            blocks_stored=tier.num_stored,
            gone=tier.num_gone,
            failed=tier.num_failed,
            refused=tier.num_unstored,
            loading=tier.num_loading,
            storing=tier.num_storing,
            states=states,
        )


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counts of the files of compressed prefixes.

    files, num_bytes: may be read
    recovered: found at the start
    hits:  requests that began with one that had been read
    unfit: whole files that this engine had no use for
    loading, storing: under way
    """

    counters: PrefixCounters
    files: int
    num_bytes: int
    recovered: int
    hits: int
    unfit: int
    loading: int
    storing: int


@dataclass(frozen=True, slots=True)
class HostStateStats:
    """Counts of recurrent layers' states on the host.

    kept: can be found
    stored, loaded: copies to the host and from there since the start; failed: copies that were not made
    """

    num_slots: int
    kept: int
    stored: int
    loaded: int
    failed: int

    @classmethod
    def of(cls, states: HostStates) -> HostStateStats:
        counts = states.counts
        return cls(states.slots.num_slots, states.slots.num_live, counts.stored, counts.loaded, counts.failed)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts of everything below the pool.

    parked_seqs, parked_slots: preempted sequences that wait for their blocks, and the slots that they alone
                     hold
    swaps:           sequences parked since the start
    swap_in_bytes:   of moves.load_bytes, those of resumed sequences
    deferred_seqs:   sequences that wait for a read from disk
    asked_tokens:    tokens in full blocks that the pool did not have, at each admission
    host_hit_tokens: of these, tokens that came from the host alone
    disk_hit_tokens: tokens that had been read from disk for the waiting request
    refused:         full blocks without a free slot on the host
    bytes_per_block: moved per block
    disk:            None without a file
    prefixes:        compressed ones on disk; None without
    states:          of recurrent layers, behind prefixes on the host; None without
    """

    host: SlotStats
    moves: MoveTotals
    parked_seqs: int
    parked_slots: int
    swaps: int
    swap_in_bytes: int
    deferred_seqs: int
    asked_tokens: int
    host_hit_tokens: int
    disk_hit_tokens: int
    refused: int
    bytes_per_block: int
    disk: DiskStats | None
    prefixes: PrefixStats | None = None
    states: HostStateStats | None = None
