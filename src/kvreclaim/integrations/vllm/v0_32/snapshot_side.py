"""Snapshots in the scheduler of vLLM 0.32: their blocks' names in its prefix index, and requests that begin
with them.

A request that begins with a snapshot gets its blocks and holes for what is evicted, as its table would be if
it had been compressed itself; vLLM takes all of it for a prefix hit. Workers get the table without holes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvreclaim.integrations.vllm.refusals import signatures
from kvreclaim.integrations.vllm.scheduler.snapshots import KVSnapshot, KVSnapshots
from kvreclaim.integrations.vllm.v0_32.scheduler_side import ReclaimKVCacheManager, VllmPool

NULL_BLOCK = 0


def adopt_snapshots(scheduler: Any) -> None:
    """Make a scheduler with a ledger keep snapshots. Raises: UnsupportedVllmError."""
    signatures.check_snapshots()
    manager, kind = scheduler.kv_cache_manager, type(scheduler)
    manager.__class__ = SnapshotKVCacheManager
    manager.snapshots = SchedulerSnapshots(scheduler.reclaim, NamedBlocks(scheduler.reclaim.pool))
    manager.found = {}
    scheduler.__class__ = type(f"Snapshot{kind.__name__}", (SnapshotHooks, kind), {})


class SnapshotHooks:
    """Snapshots of one of our schedulers."""

    kv_cache_manager: SnapshotKVCacheManager

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.kv_cache_manager.snapshots.send(output)
        return output

    def _free_request_blocks(self, request: Any) -> None:
        self.kv_cache_manager.snapshots.keep(request)
        super()._free_request_blocks(request)  # type: ignore[misc]


class NamedBlocks:
    """vLLM's block pool as a snapshots.NamingPool."""

    def __init__(self, pool: VllmPool) -> None:
        self.pool, self.hash_size = pool, int(pool.pool.hash_block_size)
        self._numbers = count()

    def name_blocks(self, request_id: str, num_blocks: int) -> tuple[tuple[int, Any], ...]:
        table = self.pool.tables.req_to_blocks[request_id]
        blocks = [block for block in table if not block.is_null][:num_blocks]
        for block in blocks:
            if block.block_hash is None:
                name = BlockHash(b"kvreclaim snapshot %20d" % next(self._numbers))
                key = make_block_hash_with_group_id(name, self.pool.tables.kv_cache_group_id)
                self.pool.pool._insert_block_hash(key, block, num_tokens=None)
        return tuple((block.block_id, block.block_hash) for block in blocks)

    def are_named(self, named: Sequence[tuple[int, Any]]) -> bool:
        blocks = self.pool.pool.blocks
        return all(blocks[block_id].block_hash == name for block_id, name in named)


class SchedulerSnapshots(KVSnapshots):
    """KVSnapshots that send their news with a scheduler's output."""

    def send(self, output: Any) -> None:
        """Add the news to a step's output, in which tables have no holes."""
        news = self.take_news()
        if news is None:
            return
        output.kvreclaim_snapshots = news
        begun, cached = {one.request_id for one in news.begun}, output.scheduled_cached_reqs
        tables = [data.block_ids for data in output.scheduled_new_reqs if data.req_id in begun]
        pairs = zip(cached.req_ids, cached.new_block_ids, strict=True)
        tables += [table for request_id, table in pairs if request_id in begun]
        for (table,) in tables:
            table[:] = [block_id for block_id in table if block_id != NULL_BLOCK]


class SnapshotKVCacheManager(ReclaimKVCacheManager):
    """Finds snapshots where they reach further than exact blocks.

    found: of requests that wait, and the blocks that the scheduler got
    """

    snapshots: SchedulerSnapshots
    found: dict[str, tuple[KVSnapshot, Any]]

    def get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, int, int]:
        exact = super().get_computed_blocks(request, *args, **kwargs)
        self.found.pop(request.request_id, None)
        if not self.prefix_cache_lookup_enabled(request):
            return exact
        snapshot = self.snapshots.find(request, exact[1])
        if snapshot is None:
            return exact
        pool = self.block_pool
        table = [pool.blocks[block_id] for block_id, _ in snapshot.named]
        table += [pool.null_block] * (snapshot.account.num_evicted // self.reclaim.block_size)
        blocks = self.create_kv_cache_blocks((table,))
        self.found[request.request_id] = snapshot, blocks
        return blocks, snapshot.num_tokens, 0

    def holes(self, request: Any) -> int:
        found = self.found.get(request.request_id)
        return 0 if found is None else found[0].account.num_evicted // self.reclaim.block_size

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        found = self.found.get(request.request_id)
        if found is None or kwargs.get("new_computed_blocks") is not found[1]:
            return super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        kwargs["delay_cache_blocks"] = True  # what follows the snapshot is not exact
        slots = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if slots is not None:
            del self.found[request.request_id]
            tables = self.snapshots.ledger.pool.tables  # type: ignore[attr-defined]
            tables.num_cached_block[request.request_id] = sys.maxsize
            self.snapshots.begin(request, found[0])
        return slots

    def free(self, request: Any) -> None:
        self.found.pop(request.request_id, None)
        super().free(request)
