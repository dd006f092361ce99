"""Which tier of a memory a recorded trace hits. Integers only; a slot is a block of the trace.

Every tier evicts least recently used first, and a hit on the device is one of the host, too. So the host
holds what one cache of its own size would hold, and the device adds no hits, only nearer ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvreclaim.bench.common import Row, sheet
from kvreclaim.bench.prefix import begin, replay_by_request
from kvreclaim.bench.prefix_trace import TracedRequest, read_trace
from kvreclaim.bench.tiers.plan import TiersPlan
from kvreclaim.checks import require
from kvreclaim.memory.tiers.manager import TieredMemory


def run(plan: TiersPlan) -> list[Row]:
    """Returns: two rows, without the host and with it: device, host (slots), queries, hits, device_hits,
    host_hits (blocks), hit_rate. Raises: InvalidArgumentError."""
    assert plan.trace is not None, "the caller has one"
    requests, (device, host) = read_trace(plan.trace), plan.tiers
    longest = max(len(request.block_ids) for request in requests)
    require(
        device >= longest,
        f"--tiers gives the device {device} blocks, but a request of the trace has {longest} and must fit.",
    )
    alone = replay_by_request(requests, "lru", device)
    kept = {name: alone[name] for name in ("queries", "hits", "hit_rate")}
    first = {"device": device, "host": 0, **kept, "device_hits": alone["hits"], "host_hits": 0}
    return [first, replay(requests, device, host)]


def replay(requests: Sequence[TracedRequest], device: int, host: int) -> Row:
    """One request after the other, each with its moves, as an engine makes them."""
    memory = TieredMemory(device, 1, num_host_slots=host, eviction_policy="lru", host_eviction_policy="lru")
    hits = 0
    for number, request in enumerate(requests):
        hits += begin(memory, number, request.block_ids)
        memory.pop_swap_ins()
        memory.release_copy_sources()
        memory.pop_stores()
        memory.free(number)
    memory.check()
    queries, below = sum(len(request.block_ids) for request in requests), memory.counts.from_host
    return {
        "device": device,
        "host": host,
        "queries": queries,
        "hits": hits,
        "hit_rate": hits / queries,
        "device_hits": hits - below,
        "host_hits": below,
    }


def hits_table(rows: Sequence[Row]) -> Table:
    """For people."""
    columns = {
        "device": "{device:,}",
        "host": "{host:,}",
        "blocks asked for": "{queries:,}",
        "hit on the device": "{device_hits:,}",
        "hit on the host": "{host_hits:,}",
        "hit rate": "{hit_rate:.4f}",
    }
    return sheet("prefix hits by tier, least recently used", columns, rows, text_columns=0)
