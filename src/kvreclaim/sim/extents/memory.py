"""The memory manager as the scheduler sees it, in runs. Exact: every count is that of MemoryManager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, cast

from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import NO_GROWTH, Growth, Shrunk, TableState
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.offload import NoOffload, OffloadSlots
from kvreclaim.memory.prefix.index import INELIGIBLE, MISS_REASONS, SUB_BLOCK
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.memory.stats import MemoryStats
from kvreclaim.sim.content import Links, TraceKeys, TraceTokens
from kvreclaim.sim.extents.pool import ExtentPool
from kvreclaim.sim.extents.run import ROOT, Run, RunTable

_SOME = Growth((0,), ())


@dataclass(frozen=True, slots=True)
class ExtentMatch(PrefixMatch):
    """pieces: (run, blocks of it from its start); group, place: where the next block belongs."""

    pieces: tuple[tuple[Run, int], ...] = ()
    num_blocks: int = 0
    group: int = 0
    place: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.keys.block_size


class ExtentMemory:
    """A KVMemory for sequences of a trace: one pool under the order lru, without pins, offload and forks. It
    answers as a MemoryManager does, and refuses what needs the blocks' names."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("blocks that are only counted have no names; simulate with extents=False")

    ref_count = blocks = num_blocks = fork = num_to_fork = adopt = rest = wake = _refuse
    shrink = release_out_of_window = drop_blocks = _refuse

    def __init__(
        self, num_blocks: int, block_size: int, links: Links, *, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.pool = ExtentPool(num_blocks)
        self.offload: OffloadSlots = NoOffload()
        self.recurrent: RecurrentGroup | None = None
        self._links = links
        self.num_idle, self.max_idle = 0, None
        self._enabled = enable_prefix_caching
        self._tables: dict[int, Any] = {}
        self._freed = self._query_tokens = self._hit_tokens = 0
        self._misses = dict.fromkeys(MISS_REASONS, 0)

    def table(self, seq_id: int) -> Any:
        try:
            return self._tables[seq_id]
        except KeyError:
            raise UnknownRequestError(f"sequence {seq_id} holds no blocks; admit it first") from None

    def keys(self, token_ids: Any, cache_salt: str | None = None, *, lasting: bool = True) -> TraceKeys:
        assert isinstance(token_ids, TraceTokens), f"{type(token_ids).__name__} are no tokens of a trace"
        return TraceKeys(self._links, token_ids)

    @property
    def num_pool_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_in_use(self) -> int:
        return self.pool.num_in_use

    def publishes(self, seq_id: int) -> bool:
        return self.table(seq_id).chain is not None

    @property
    def index_version(self) -> int:
        return self.pool.version

    def match_prefix(self, keys: Any, *, max_tokens: int | None = None) -> ExtentMatch:
        if not self._enabled:
            return ExtentMatch(keys, (), INELIGIBLE)
        most = keys.num_tokens - 1 if max_tokens is None else min(keys.num_tokens - 1, max_tokens)
        left = max(0, most) // self.block_size
        numbers, counts = keys.groups
        nodes, link, found, group, place = self.pool.nodes, ROOT, 0, 0, 0
        pieces: list[tuple[Run, int]] = []
        while left:
            if group < len(counts) and place >= counts[group]:
                group, place = group + 1, 0
                continue
            number = numbers[group]
            node = nodes.get(number)
            run = node.at(place) if node is not None else None
            if run is None or run.parent != link or run.start != place:
                miss = self.pool.why_missing(number, place)
                return ExtentMatch(keys, (), miss, (), tuple(pieces), found, group, place)
            taken = min(run.count, left)
            if group < len(counts):
                taken = min(taken, counts[group] - place)
            pieces.append((run, taken))
            found += taken
            left -= taken
            place += taken
            link = number, run.epoch, place - 1
        return ExtentMatch(keys, (), INELIGIBLE, (), tuple(pieces), found, group, place)

    def num_spare(self, match: PrefixMatch) -> int:
        pieces = cast(ExtentMatch, match).pieces
        return self.pool.num_free - sum(count for run, count in pieces if not run.holders)

    def num_shared(self, match: PrefixMatch) -> int:
        return sum(count for run, count in cast(ExtentMatch, match).pieces if run.holders)

    def can_admit(self, match: PrefixMatch, num_tokens: int) -> bool:
        return blocks_for(num_tokens, self.block_size) <= self.num_spare(match)

    def admit(self, seq_id: int, match: PrefixMatch, *, priority: int = 0) -> None:
        if seq_id in self._tables:
            raise InvalidArgumentError(
                f"sequence {seq_id} exists already; an id names one live sequence; free it or use another"
            )
        assert isinstance(match, ExtentMatch), "another memory's match"
        self._count(match)
        table = RunTable(cast(TraceKeys, match.keys), ROOT if self._enabled else None, priority)
        for run, num_blocks in match.pieces:
            self.pool.hold(run, num_blocks, table)
        if table.runs:
            last = table.runs[-1]
            table.chain = last.link(last.end - 1)
        table.group, table.place = match.group, match.place
        table.num_blocks = match.num_blocks
        table.logical_len = table.physical_len = match.num_tokens
        self._tables[seq_id] = table

    def _count(self, match: ExtentMatch) -> None:
        num_tokens, size = match.keys.num_tokens, self.block_size
        in_full_blocks = max(0, num_tokens - 1) // size * size
        self._query_tokens += num_tokens
        self._hit_tokens += match.num_tokens
        self._misses[match.miss] += in_full_blocks - match.num_tokens
        self._misses[SUB_BLOCK] += num_tokens - in_full_blocks

    def free(self, seq_id: int) -> int:
        table = self._tables.pop(seq_id)
        pool = self.pool
        freed = pool.drop_blank(table.room)
        for run in reversed(table.runs):
            freed += pool.drop(run, table)
        return int(freed)

    def has_room(self, seq_id: int, num_tokens: int) -> bool:
        table = self._tables[seq_id]
        return bool(table.physical_len + num_tokens <= table.num_blocks * self.block_size)

    def can_grow(self, seq_id: int, num_tokens: int) -> bool:
        table = self._tables[seq_id]
        needed = -(-(table.physical_len + num_tokens) // self.block_size)
        return bool(needed - table.num_blocks <= self.pool.num_free)

    def stops(self, seq_id: int) -> tuple[int, ...]:
        return ()

    def grow(self, seq_id: int, num_tokens: int, num_drafts: int = 0) -> Growth:
        table = self._tables[seq_id]
        missing = -(-(table.physical_len + num_tokens) // self.block_size) - table.num_blocks
        if missing <= 0:
            return NO_GROWTH
        self.pool.allocate(missing)
        table.room += missing
        table.num_blocks += missing
        return _SOME

    def release_copy_sources(self) -> None:
        """Nothing is ever copied."""

    def commit(self, seq_id: int, num_tokens: int, *, exact: bool = True) -> None:
        table, size = self._tables[seq_id], self.block_size
        start = table.physical_len
        assert start + num_tokens <= table.num_blocks * size, f"sequence {seq_id}: {num_tokens} have no room"
        if not exact and table.exact:
            table.mark_inexact()
        table.logical_len += num_tokens
        table.physical_len = end = start + num_tokens
        if table.chain is not None and (full := end // size - start // size):
            self.pool.enter(table, full)

    def table_state(self, seq_id: int) -> TableState:
        """Made-up blocks: they do not matter where nothing moves."""
        count = self.table(seq_id).num_blocks
        return TableState(range(count), (1,) * count, (False,) * count)

    def compact(self, seq_id: int, keep: int) -> Shrunk | None:
        """Choose targets as plan_compaction does: own blocks outside the index, then fresh ones, or, where
        these lack, own ones that leave the index, from the end."""
        table, pool = self._tables[seq_id], self.pool
        needed = blocks_for(keep, self.block_size)
        mine = [run for run in table.runs if len(run.holders) == 1]
        own = min(needed, table.room + sum(run.count for run in mine if run.node is None))
        fresh, strip = needed - own, 0
        if fresh > pool.num_free:
            strip = min(fresh, sum(run.count for run in mine if run.node is not None))
            fresh -= strip
            if fresh > pool.num_free:
                return None
        pool.allocate(fresh)
        freed = self._drop_all_but(table, own, strip) - fresh
        table.mark_inexact()
        table.room = table.num_blocks = needed
        table.physical_len = keep
        self._freed += freed
        return Shrunk((), freed)

    def _drop_all_but(self, table: RunTable, own: int, strip: int) -> int:
        """Free all blocks, the last first, except the first `own` ones of this table outside the index and
        the last `strip` ones in it. Returns: blocks without a holder now."""
        pool, runs, kept = self.pool, table.runs, []
        table.runs = []
        for run in runs:
            stays = min(own, run.count) if run.node is None and len(run.holders) == 1 else 0
            own -= stays
            kept.append(stays)
        freed = int(pool.drop_blank(table.room - own))
        for run, stays in zip(reversed(runs), reversed(kept), strict=True):
            if strip and run.node is not None and len(run.holders) == 1:
                stays = min(strip, run.count)
                strip -= stays
                if stays == run.count:
                    pool.unindex(run, stays)
            run.count -= stays
            if run.count:
                freed += pool.drop(run, table)
        return freed

    def num_shared_of(self, seq_id: int) -> int:
        return sum(run.count for run in self._tables[seq_id].runs if len(run.holders) > 1)

    def first_lacking(self, passes: Iterable[tuple[int, int]], unsure: Container[int] = ()) -> int | None:
        assert not unsure, "the simulator drafts nothing"
        free, gone = self.pool.num_free, Counter[int]()
        for seq_id, keep in passes:
            table = self._tables[seq_id]
            shared = [run for run in table.runs if len(run.holders) - gone[id(run)] > 1]
            own = table.num_blocks - sum(run.count for run in shared)
            needed = blocks_for(keep, self.block_size)
            if needed - own > free:
                return seq_id
            free += own - needed
            gone.update(map(id, shared))
        return None

    def mark_inexact(self, seq_id: int) -> None:
        self.table(seq_id).mark_inexact()

    def stats(self) -> MemoryStats:
        pool = self.pool
        return MemoryStats(
            num_blocks=pool.num_blocks,
            in_use=pool.num_in_use,
            cached=pool.num_cached,
            free=pool.num_free - pool.num_cached,
            peak_in_use=pool.peak_in_use,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
            prefix_evictions=pool.num_evictions,
            blocks_freed_by_compression=self._freed,
            cow_copies=0,
            pinned=0,
            pins_refused=0,
            misses=self._misses.copy(),
        )

    def follows_itself(self, seq_id: int) -> bool:
        table = self._tables[seq_id]
        if table.chain is None:
            return True
        if table.runs and table.runs[-1].node is None:
            return False
        numbers, counts = table.keys.groups
        if table.group < len(counts):
            return False
        node = self.pool.nodes.get(numbers[table.group])
        return node is None or all(run.start + run.count <= table.place for run in node.runs)

    def check(self) -> None:
        """Runs, tables and counts agree. Raises AssertionError."""
        pool = self.pool
        queued = list(pool.queue)
        assert sum(run.count for run in queued) == pool.num_free, f"{pool.num_free} free are counted"
        assert sum(run.count for run in queued if run.node) == pool.num_cached, f"{pool.num_cached} cached"
        assert all(run.count > 0 and not run.holders for run in queued), "a queued run is held or empty"
        held = {id(run): run for table in self._tables.values() for run in table.runs}
        room = sum(table.room for table in self._tables.values())
        assert sum(run.count for run in held.values()) + room == pool.num_in_use, "blocks in use"
        for seq_id, table in self._tables.items():
            assert sum(run.count for run in table.runs) + table.room == table.num_blocks, f"{seq_id}"
            assert table.room >= 0, f"{seq_id}: {table.room}"
            assert all(table in run.holders for run in table.runs), f"{seq_id}"
        there = {id(run) for run in queued} | held.keys()
        for node in pool.nodes.values():
            ends = [(run.start, run.start + run.count) for run in node.runs]
            assert all(a[1] <= b[0] for a, b in pairwise(ends)), f"{ends}"
            assert all(run.node is node and id(run) in there for run in node.runs), "lost"
