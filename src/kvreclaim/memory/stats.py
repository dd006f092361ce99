"""Statistics of the memory manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreclaim.memory.groups.state_slots import NO_STATES, StateCounts
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A snapshot; free + cached + in_use = num_blocks.

    in_use, cached, free:        held by active sequences; unreferenced, or held by snapshots alone, and still
                                 useful to later requests; neither
    peak_in_use:                 the most blocks in use since the start or the last reset_peak
    pinned:                      blocks with a live pin, in use or not; some of in_use and cached
    prefix_query_tokens:         prompt tokens of the sequences admitted
    prefix_hit_tokens:           those of them that were found
    misses:                      the others, by each reason of MISS_REASONS
    prefix_evictions:            cached blocks reused for something else
    pins_refused:                blocks that were not pinned, or no longer, because too many others were
    blocks_freed_by_compression: net of fresh blocks, so it can fall while siblings hold the rest; blocks that
                                 only snapshots hold count as freed
    states:                      slots of recurrent layers; zeros without such layers
    cow_copies:                  shared tail blocks that had to be copied before a write
    """

    num_blocks: int
    in_use: int
    cached: int
    free: int
    peak_in_use: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_evictions: int
    blocks_freed_by_compression: int
    cow_copies: int
    pinned: int
    pins_refused: int
    misses: Mapping[str, int]
    states: StateCounts = NO_STATES


def memory_stats(
    pool: BlockPool, prefix: PrefixCache, freed: int, cow_copies: int, states: StateCounts
) -> MemoryStats:
    """Return a snapshot. freed: blocks freed by compression"""
    if pool.pins.ttl_s:
        pool.pins.expire()
    return MemoryStats(
        num_blocks=pool.num_blocks,
        in_use=pool.num_in_use,
        cached=pool.num_cached + pool.num_idle,
        free=pool.num_free - pool.num_cached,
        peak_in_use=pool.peak_in_use,
        prefix_query_tokens=prefix.query_tokens,
        prefix_hit_tokens=prefix.hit_tokens,
        prefix_evictions=pool.num_evictions,
        blocks_freed_by_compression=freed,
        cow_copies=cow_copies,
        pinned=len(pool.pins.ttl_s),
        pins_refused=pool.pins.num_refused,
        misses=prefix.misses.copy(),
        states=states,
    )
