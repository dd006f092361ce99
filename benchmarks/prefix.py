"""Prefix-cache hit rates of a recorded trace, for every eviction order and size of the cache.

    python benchmarks/prefix.py --trace conversation_trace.jsonl

A block of the cache is a block of the trace (512 tokens), and every block counts, also the partial one at the
end of a prompt, as the authors of the Mooncake trace count. Requests are served one after the other;
each holds all its blocks until it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from kvreclaim.bench.common import Row, table
from kvreclaim.checks import check_choice, require
from kvreclaim.cli.bench_options import Json, publish, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.memory import MemoryManager, eviction_orders, make_order
from kvreclaim.options import option
from kvreclaim.sim.traces.files import MOONCAKE_PIECE, read_trace

BEYOND = -1


@dataclass(frozen=True)
class PrefixPlan:
    """The replay of a trace. sizes: of the caches, beside which an infinite one is replayed."""

    trace: Path = option(MISSING, "JSON lines with hash_ids, such as Mooncake's.")
    sizes: tuple[int, ...] = option(
        (1000, 4000, 16_000, 64_000), "Sizes of the cache, in blocks of the trace.", flags=("--blocks",)
    )
    orders: tuple[str, ...] = option(eviction_orders(), "Eviction orders, comma-separated.")

    def __post_init__(self) -> None:
        require(bool(self.orders), "--orders is empty; name at least one eviction order, such as lru.")
        for order in self.orders:
            check_choice("an entry of --orders", order, eviction_orders())


def run(plan: PrefixPlan) -> list[Row]:
    """Returns: a row per order and size: order, num_blocks (None: infinite), hits and queries (blocks),
    hit_rate, evictions, misses (by reason)."""
    requests = [asked.ids for asked in read_trace(plan.trace).requests]
    longest = max(map(len, requests))
    require(longest > 0, f"--trace {plan.trace} has no hash_ids; a hit rate needs them.")
    require(
        min(plan.sizes, default=longest) >= longest,
        f"--blocks holds {min(plan.sizes)}, but a request of the trace has {longest} blocks and must fit.",
    )
    infinite = sum(map(len, requests))
    return [
        {"order": order, "num_blocks": size, **replay(requests, order, size or infinite)}
        for order in plan.orders
        for size in (*plan.sizes, None)
    ]


def replay(requests: Sequence[Sequence[Any]], order: str, num_blocks: int) -> Row:
    """Through a memory manager of one slot per block, as an engine would call it."""
    memory = MemoryManager(num_blocks, 1, eviction_policy=make_order(order, num_blocks, MOONCAKE_PIECE))
    hits = 0
    for number, ids in enumerate(requests):
        # one slot more, which is never computed, because a hit always leaves one
        match = memory.match_prefix(memory.keys((*ids, BEYOND)))
        memory.admit(number, match)
        memory.grow(number, len(ids) - match.num_tokens)
        memory.commit(number, len(ids) - match.num_tokens)
        memory.free(number)
        hits += match.num_tokens
    memory.check()
    stats, queries = memory.stats(), sum(map(len, requests))
    misses = dict(stats.misses)
    misses["sub_block"] -= len(requests)
    assert hits + sum(misses.values()) == queries, f"{hits} hits, {misses}, {queries}"
    return {
        "hits": hits,
        "queries": queries,
        "hit_rate": hits / queries,
        "evictions": stats.prefix_evictions,
        "misses": {reason: blocks for reason, blocks in misses.items() if blocks},
    }


def prefix_table(rows: Sequence[Row], trace: Path) -> Table:
    """One line per order, one column per size."""
    sizes = list(dict.fromkeys(row["num_blocks"] for row in rows))
    headings = ["order", *("infinite" if size is None else f"{size:,}" for size in sizes)]
    made = table(f"prefix hit rate by blocks of the cache, {trace.name}", headings)
    for order in dict.fromkeys(row["order"] for row in rows):
        made.add_row(order, *(f"{row['hit_rate']:.4f}" for row in rows if row["order"] == order))
    return made


@script
def app(plan: Annotated[PrefixPlan, ConfigOptions(config=PrefixPlan)], json_file: Json = None) -> None:
    """Prefix hit rates of a block-hash trace, by eviction order and size of the cache."""
    rows = run(plan)
    publish(rows, [prefix_table(rows, plan.trace)], json_file, trace=plan.trace.name)


if __name__ == "__main__":
    app()
