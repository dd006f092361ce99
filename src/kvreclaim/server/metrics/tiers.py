"""Figures of host and disk, 0 where there are none."""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.engine.offload.stats import DiskStats, PrefixCounters, PrefixStats, SlotStats, TierStats

Values = float | Mapping[str, float] | Mapping[tuple[str, str], float]
"""A metric's values: one, or one per value of its label or labels."""

STATES = ("in_use", "cached", "free")


def tier_values(stats: TierStats | None, num_hit: int) -> dict[str, Values]:
    """num_hit: prompt tokens that were found in any tier"""
    if stats is None:
        return _found(0, 0, 0, 0, num_hit) | _moved(None) | _failed(None) | _slots(None) | _prefixes(None)
    host, disk = stats.host_hit_tokens, stats.disk_hit_tokens
    missed_on_disk = 0 if stats.disk is None else stats.asked_tokens - host - disk
    found = _found(stats.asked_tokens, host, disk, missed_on_disk, num_hit)
    return found | _moved(stats) | _failed(stats) | _slots(stats) | _prefixes(stats.prefixes)


def _found(queried: int, host: int, disk: int, missed_on_disk: int, num_hit: int) -> dict[str, Values]:
    by_tier = {"device": num_hit - host - disk, "host": host, "disk": disk}
    return {
        "vllm:external_prefix_cache_queries": queried,
        "vllm:external_prefix_cache_hits": host + disk,
        "kvreclaim:tier_hit_tokens": by_tier,
        "kvreclaim:tier_misses": {"host": queried - host, "disk": missed_on_disk},
    }


def _moved(stats: TierStats | None) -> dict[str, Values]:
    moves, disk = (stats.moves, stats.disk) if stats is not None else (None, None)
    return {
        "vllm:kv_offload_load_bytes": moves.load_bytes if moves else 0,
        "vllm:kv_offload_load_time": moves.load_s if moves else 0,
        "vllm:kv_offload_store_bytes": moves.store_bytes + moves.out_bytes if moves else 0,
        "vllm:kv_offload_store_time": moves.store_s + moves.out_s if moves else 0,
        "vllm:kv_offload_tiering_read_bytes": disk.counters.loaded_bytes if disk else 0,
        "vllm:kv_offload_tiering_write_bytes": disk.counters.stored_bytes if disk else 0,
        "kvreclaim:preemption_swaps": stats.swaps if stats else 0,
        "kvreclaim:swap_out_bytes": moves.out_bytes if moves else 0,
        "kvreclaim:swap_in_bytes": stats.swap_in_bytes if stats else 0,
        "kvreclaim:parked_sequences": stats.parked_seqs if stats else 0,
        "kvreclaim:parked_slots": stats.parked_slots if stats else 0,
        "kvreclaim:host_states": stats.states.kept if stats and stats.states else 0,
    }


def _failed(stats: TierStats | None) -> dict[str, Values]:
    disk: DiskStats | None = stats.disk if stats else None
    states = stats.states if stats else None
    return {
        "kvreclaim:tier_corrupt": {"disk": disk.counters.corrupt if disk else 0},
        "kvreclaim:tier_failed": {
            "host": (stats.moves.failed_stores if stats else 0) + (states.failed if states else 0),
            "disk": disk.counters.io_errors if disk else 0,
        },
        "kvreclaim:tier_dropped": {"disk": disk.counters.dropped if disk else 0},
        "kvreclaim:tier_refused": {
            "host": stats.refused if stats else 0,
            "disk": disk.refused if disk else 0,
        },
    }


def _prefixes(stats: PrefixStats | None) -> dict[str, Values]:
    """Values for compressed prefixes on disk."""
    counters = PrefixCounters() if stats is None else stats.counters
    found: dict[str, Values] = {
        "files": 0 if stats is None else stats.files,
        "file_bytes": 0 if stats is None else stats.num_bytes,
        "stores": counters.stores,
        "write_bytes": counters.stored_bytes,
        "loads": counters.loads,
        "read_bytes": counters.loaded_bytes,
        "hits": 0 if stats is None else stats.hits,
        "corrupt": counters.corrupt + (0 if stats is None else stats.unfit),
        "failed": counters.io_errors,
        "dropped": counters.dropped,
        "evictions": counters.removed,
    }
    return {f"kvreclaim:compressed_prefix_{name}": value for name, value in found.items()}


def _slots(stats: TierStats | None) -> dict[str, Values]:
    host = stats.host if stats else None
    disk = stats.disk.slots if stats and stats.disk else None
    tiers: dict[str, SlotStats | None] = {"host": host, "disk": disk}
    return {
        "vllm:kv_offload_cpu_cache_usage_perc": 1 - host.free / host.num_slots if host else 0,
        "kvreclaim:tier_slots": {
            (name, state): getattr(slots, state) if slots else 0
            for name, slots in tiers.items()
            for state in STATES
        },
        "kvreclaim:tier_evictions": {name: slots.evictions if slots else 0 for name, slots in tiers.items()},
    }
