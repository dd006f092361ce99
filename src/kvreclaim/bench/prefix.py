"""Prefix-cache hit rates of a recorded trace, for every eviction order and size of the cache.

A block of the cache is a block of the trace (512 tokens), and every block counts, the partial one at
the end of a prompt, too, as the authors of the Mooncake trace count. Requests are served one after the
other; none overlaps another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from kvreclaim.bench.common import Row, table
from kvreclaim.bench.plans import PrefixPlan
from kvreclaim.bench.prefix_trace import TOKENS_PER_HASH, TracedRequest, read_trace
from kvreclaim.checks import require
from kvreclaim.memory import BlockPool, MemoryManager, make_order
from kvreclaim.memory.prefix.index import Entry, Link
from kvreclaim.memory.prefix.keys import BlockHash, BlockKeys

BY_REQUEST: Final = "by request"
"""The engine's order: a request holds all its blocks until it ends, then gives them back last first."""
BY_BLOCK: Final = "by block"
"""The order behind figures published with such traces: each block of a prompt is looked up, used and
given back before the next one. Least recently used order only."""
BEYOND = -1


def run(plan: PrefixPlan, note: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Replay the trace. note is told of each replay that begins.

    Returns: a row per order, rule and size: order, rule, num_blocks (None: infinite), hits and queries
        (blocks), hit_rate, evictions, misses (by reason; by request only).
    """
    requests = read_trace(plan.trace)
    longest = max(len(request.block_ids) for request in requests)
    for size in plan.sizes:
        require(
            size >= longest,
            f"--blocks holds {size}, but a request of the trace has {longest} blocks and must fit in it.",
        )
    infinite = sum(len(request.block_ids) for request in requests)
    rows = []
    for order in plan.orders:
        for rule in (BY_BLOCK, BY_REQUEST) if order == "lru" else (BY_REQUEST,):
            replay = replay_by_block if rule == BY_BLOCK else replay_by_request
            for num_blocks in (*plan.sizes, None):
                note(f"{order}, {rule}, {'infinite' if num_blocks is None else f'{num_blocks:,} blocks'}")
                row: Row = {"order": order, "rule": rule, "num_blocks": num_blocks}
                rows.append(row | replay(requests, order, num_blocks or infinite))
    return rows


def replay_by_request(requests: Sequence[TracedRequest], order: str, num_blocks: int) -> Row:
    """Through a memory manager, as an engine would call it."""
    memory = MemoryManager(num_blocks, 1, eviction_policy=make_order(order, num_blocks, TOKENS_PER_HASH))
    hits = 0
    for number, request in enumerate(requests):
        hits += begin(memory, number, request.block_ids)
        memory.free(number)
    memory.check()
    stats = memory.stats()
    misses = dict(stats.misses)
    misses["sub_block"] -= len(requests)
    counts = _counts(requests, hits, stats.prefix_evictions)
    assert hits + sum(misses.values()) == counts["queries"], f"{hits} hits, {misses}, {counts}"
    return counts | {"misses": {reason: blocks for reason, blocks in misses.items() if blocks}}


def begin(memory: MemoryManager, seq_id: int, block_ids: Sequence[int], salt: str | None = None) -> int:
    """Admit and compute a request in a memory of one slot per block. Returns: blocks hit.

    The prompt ends with one slot more, which is never computed, because a hit always leaves one.
    """
    match = memory.match_prefix(memory.keys((*block_ids, BEYOND), salt))
    memory.admit(seq_id, match)
    missed = len(block_ids) - match.num_tokens
    memory.grow(seq_id, missed)
    memory.commit(seq_id, missed)
    return match.num_tokens


def replay_by_block(requests: Sequence[TracedRequest], order: str, num_blocks: int) -> Row:
    """Through a block pool, one block at a time."""
    pool = BlockPool(num_blocks, order=make_order(order, num_blocks, TOKENS_PER_HASH))
    hits = sum(_walk(pool, request.block_ids) for request in requests)
    pool.check()
    return _counts(requests, hits, pool.num_evictions)


def _walk(pool: BlockPool, block_ids: Sequence[int]) -> int:
    """Returns: blocks hit before the first that was not."""
    keys = BlockKeys(BlockHash(1), block_ids)
    link: Link = pool.index.root(None)
    hits, unbroken = 0, True
    for i in range(len(block_ids)):
        entry: Entry | None = pool.index.find(link, keys[i])
        if entry is None:
            unbroken = False
            (block,) = pool.allocate(1)
            entry = pool.enter(block, link, keys[i])
            assert entry is not None, f"block {block} took the place of the block before it"
        else:
            block = entry.block
            pool.hit((block,), 0)
            hits += unbroken
        pool.release((block,))
        link = entry
    return hits


def _counts(requests: Sequence[TracedRequest], hits: int, evictions: int) -> Row:
    queries = sum(len(request.block_ids) for request in requests)
    return {"hits": hits, "queries": queries, "hit_rate": hits / queries, "evictions": evictions}


def prefix_table(rows: Sequence[Row], trace: Path) -> Table:
    """One line per order and rule, one column per size."""
    sizes = list(dict.fromkeys(row["num_blocks"] for row in rows))
    headings = ["order", "counted", *("infinite" if size is None else f"{size:,}" for size in sizes)]
    made = table(f"prefix hit rate by blocks of the cache, {trace.name}", headings, text_columns=2)
    for order, rule in dict.fromkeys((row["order"], row["rule"]) for row in rows):
        rates = [row["hit_rate"] for row in rows if (row["order"], row["rule"]) == (order, rule)]
        made.add_row(order, rule, *(f"{rate:.4f}".removeprefix("0") for rate in rates))
    return made
