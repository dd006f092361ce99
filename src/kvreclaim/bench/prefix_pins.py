"""What pins do to those who do not pin: two tenants in one cache, one of which pins all it sends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from kvreclaim.bench.common import Row, sheet
from kvreclaim.bench.prefix import begin
from kvreclaim.bench.prefix_trace import TracedRequest, read_trace
from kvreclaim.memory import MemoryManager, Retention

PINNING, OTHER = "pinning", "other"
TTL_S = 3600.0
FRACTIONS = (0.0, 0.25, 0.5, 1.0)


def run(trace: Path, sizes: Sequence[int], fractions: Sequence[float] = FRACTIONS) -> list[Row]:
    """Replay the trace for two tenants, each conversation of which is one's or the other's.

    Every prompt of the first is pinned as a whole for an hour. Nothing is shared between them.

    Returns: per size and max_pinned_fraction (0: no pin is granted): num_blocks, max_pinned_fraction,
        hit_rate of each tenant, pins_refused (blocks), pinned (blocks, at the end), and alone_in_half:
        the other tenant's hit rate in a cache of half the size that it has for itself.
    """
    requests = read_trace(trace)
    others = [request for request in requests if tenant_of(request) == OTHER]
    alone = {size: _replay(others, size // 2, 0.0)[OTHER] for size in sizes}
    return [
        _replay(requests, size, fraction) | {"alone_in_half": alone[size]}
        for size in sizes
        for fraction in fractions
    ]


def tenant_of(request: TracedRequest) -> str:
    """By the second block, which a conversation's turns share, where the first is common to all."""
    return OTHER if request.block_ids[:2][-1] % 2 else PINNING


def _replay(requests: Sequence[TracedRequest], num_blocks: int, fraction: float) -> Row:
    now = 0.0  # the trace's own time
    memory = MemoryManager(num_blocks, 1, max_pinned_fraction=fraction, clock=lambda: now)
    hits, queries = {PINNING: 0, OTHER: 0}, {PINNING: 0, OTHER: 0}
    for number, request in enumerate(requests):
        now, tenant = request.arrival_s, tenant_of(request)
        hits[tenant] += begin(memory, number, request.block_ids, tenant)
        queries[tenant] += len(request.block_ids)
        if tenant == PINNING:
            memory.pin(number, [Retention(len(request.block_ids), TTL_S)])
        memory.free(number)
    memory.check()
    stats = memory.stats()
    rates = {tenant: hits[tenant] / max(1, queries[tenant]) for tenant in hits}
    return {
        "num_blocks": num_blocks,
        "max_pinned_fraction": fraction,
        **rates,
        "pinned": stats.pinned,
        "pins_refused": stats.pins_refused,
    }


def pins_table(rows: Sequence[Row]) -> Table:
    columns = {
        "blocks": "{num_blocks:,}",
        "may be pinned": "{max_pinned_fraction:.0%}",
        "pinning": "{pinning:.4f}",
        "other": "{other:.4f}",
        "other alone in half": "{alone_in_half:.4f}",
        "pinned": "{pinned:,}",
        "refused": "{pins_refused:,}",
    }
    title = "hit rates of two tenants, one of which pins everything for an hour"
    return sheet(title, columns, rows, text_columns=0)
