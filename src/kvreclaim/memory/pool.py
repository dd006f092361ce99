"""The pool of physical blocks: reference counts, reuse order and prefix index."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import CACHED, INDEXED, PINNED, WINDOW
from kvreclaim.memory.eviction.base import EvictionOrder
from kvreclaim.memory.eviction.lru import LRU, FreeQueue
from kvreclaim.memory.pins import Pins
from kvreclaim.memory.prefix.index import BlockKey, Entry, Link, PrefixIndex
from kvreclaim.memory.windows import Row, RowKey, WindowIndex


class BlockPool:
    """Every block is in use, held by idle sequences alone (which can be evicted), or queued for reuse; a
    queued block that is still indexed is cached: a prefix hit can take it back until it is reused.

    An operation costs O(blocks it names), independent of the pool's size, times the eviction order's
    cost per block.

    Args:
        order:      of reuse; least recently used by default
        max_pinned: blocks that may be pinned at a time
        clock:      seconds, for pins
    """

    def __init__(
        self,
        num_blocks: int,
        index: PrefixIndex | None = None,
        *,
        order: EvictionOrder | None = None,
        max_pinned: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_blocks < 1:
            raise InvalidArgumentError(
                f"num_blocks is {num_blocks}; a pool has at least 1 block; give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self.index = PrefixIndex() if index is None else index
        self.refs = array("i", bytes(array("i").itemsize * num_blocks))
        self.idle_refs = array("i", self.refs)
        """References of idle sequences, some of refs."""
        self.num_idle = 0
        """Blocks that only idle sequences hold."""
        self.marks = bytearray(num_blocks)
        self.free_queue: EvictionOrder = LRU(num_blocks) if order is None else order
        self.pins = Pins(self.marks, max_pinned, clock)
        self.rows = WindowIndex()
        self.leaving = FreeQueue(num_blocks, filled=False)
        """Cached blocks that are reused before those of free_queue."""
        self.num_free = num_blocks
        """Blocks that allocate can give, cached and pinned ones included."""
        self.num_cached = 0
        self.num_evictions = 0
        self.peak_in_use = 0

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free - self.num_idle

    def allocate(self, n: int) -> list[int]:
        """Take the next n blocks to be reused, one reference each, and forget what they cached. Pinned blocks
        come after all others. n is at most num_free."""
        assert 0 <= n <= self.num_free, f"{n} blocks wanted, {self.num_free} free"
        pop, refs, marks = self.free_queue.pop, self.refs, self.marks
        if self.pins.ttl_s or self.pins.aside:
            self.pins.expire()
            pop = self._pop_sparing
        if len(self.leaving):
            pop = self._pop_leaving
        blocks, cached = [], []
        for _ in range(n):
            block = pop()
            if marks[block]:
                cached.append(block)
            refs[block] = 1
            blocks.append(block)
        self.num_free -= n
        if cached:
            self._evict(cached)
        self._note_peak()
        return blocks

    def touch(self, block: int) -> None:
        """Add a reference; a queued block leaves the queue."""
        if self.refs[block] == 0:
            if block in self.pins.aside:
                self.pins.take_back(block)
            elif len(self.leaving) and block in self.leaving:
                self.leaving.remove(block)
            else:
                self.free_queue.remove(block)
            self.num_cached -= self.marks[block] & CACHED > 0
            self.num_free -= 1
            self._note_peak()
        elif self.refs[block] == self.idle_refs[block]:
            self.num_idle -= 1
            self._note_peak()
        self.refs[block] += 1

    def hit(self, blocks: Sequence[int], priority: int) -> None:
        """Add a reference to indexed blocks that a request hits."""
        for block in blocks:
            self.touch(block)
        if self.free_queue.watches:
            for block in blocks:
                self.free_queue.used(block, priority)
        if self.pins.ttl_s:
            self.pins.refresh(blocks)

    def release(self, blocks: Iterable[int]) -> int:
        """Drop one reference each, in this order: what reaches 0 is queued.

        Returns: how many reached 0.
        """
        freed, marks, push, idle_refs = 0, self.marks, self.free_queue.push, self.idle_refs
        for block in blocks:
            refs = self.refs[block] - 1
            assert refs >= 0, f"block {block} is released but not referenced"
            self.refs[block] = refs
            if refs == 0:
                push(block)
                self.num_cached += marks[block] & CACHED > 0
                freed += 1
            elif refs == idle_refs[block]:
                self.num_idle += 1
        self.num_free += freed
        return freed

    def mark_idle(self, blocks: Iterable[int]) -> None:
        """Count one reference to each of these blocks as an idle sequence's, which is evictable."""
        refs, idle_refs = self.refs, self.idle_refs
        for block in blocks:
            idle_refs[block] += 1
            self.num_idle += refs[block] == idle_refs[block]

    def mark_active(self, blocks: Iterable[int]) -> None:
        """Undo mark_idle for one reference to each of these blocks."""
        refs, idle_refs = self.refs, self.idle_refs
        for block in blocks:
            self.num_idle -= refs[block] == idle_refs[block]
            idle_refs[block] -= 1

    def release_first(self, blocks: Iterable[int]) -> int:
        """Release blocks that are to be reused before all others that are cached."""
        freed = 0
        for block in blocks:
            if self.refs[block] > 1 or not self.marks[block]:
                freed += self.release((block,))
                continue
            self.refs[block] = 0
            self.leaving.push_back(block)
            self.num_cached += 1
            self.num_free += 1
            freed += 1
        return freed

    def enter(self, block: int, parent: Link, key: BlockKey, priority: int = 0) -> Entry | None:
        """Index a full block that is in use. Its content must not change any more.

        If an equal prefix is indexed already, that entry stays and this block is not indexed.
        An entry with the same digest but another prefix is replaced.

        Returns: the entry that the next block follows; None if the parent was evicted, because
        no later block could be reached.
        """
        assert self.refs[block] > 0, f"block {block} is indexed but not in use"
        if not self.index.is_live(parent):
            return None
        entry = self.index.at(key.digest)
        if entry is not None:
            if self.index.follows(entry, parent, key):
                if self.free_queue.watches:
                    self.free_queue.used(entry.block, priority)
                return entry
            if entry is parent:
                return None
            self.unindex(entry.block)
        self.marks[block] = INDEXED
        if self.free_queue.watches:
            self.free_queue.entered(block, priority)
        return self.index.add(parent, key, block)

    def demote(self, blocks: Iterable[int]) -> None:
        """Reuse those of these blocks that are queued before all others that are cached."""
        for block in blocks:
            if self.refs[block] == 0 and self.marks[block] and block in self.free_queue:
                self.free_queue.remove(block)
                self.leaving.push_back(block)

    def enter_row(self, key: RowKey, row: Row, priority: int) -> None:
        """Index these full blocks in use as part of a window, unless equal ones are indexed."""
        if key in self.rows or self.marks[row[0]]:
            return
        self.rows.add(key, row)
        self.index.version += 1
        for block in row:
            self.marks[block] = WINDOW
            if self.free_queue.watches:
                self.free_queue.entered(block, priority)

    def _unindex_row(self, block: int) -> None:
        """Remove this block's row from the window index."""
        self.index.version += 1
        for each in self.rows.remove(block):
            self.marks[each] = 0
            self.num_cached -= self.refs[each] == 0
            if len(self.leaving) and each in self.leaving:
                self.leaving.remove(each)
                self.free_queue.push_first(each)
            if self.free_queue.watches:
                self.free_queue.forgot(each)

    def unindex(self, block: int) -> None:
        """Forget what the block caches, if anything; it keeps its references."""
        if self.marks[block] & WINDOW:
            self._unindex_row(block)
        elif self.marks[block]:
            self.index.remove(block)
            self.num_cached -= self.refs[block] == 0
            self._unmark(block)
            if self.free_queue.watches:
                self.free_queue.forgot(block)

    def clear_index(self) -> None:
        """Forget what every block caches. O(pool)."""
        for entry in list(self.index):
            self._unmark(entry.block)
            if self.free_queue.watches:
                self.free_queue.forgot(entry.block)
        for row in list(self.rows):
            self._unindex_row(row[0])
        self.index.clear()
        self.num_cached = 0

    def reset_peak(self) -> None:
        self.peak_in_use = self.num_in_use

    def _pop_sparing(self) -> int:
        return self.pins.take(self.free_queue)

    def _pop_leaving(self) -> int:
        """Pop a block that caches nothing, if it is next; else a block that is reused before cached ones."""
        if not len(self.leaving):
            return self._pop_sparing()
        if len(self.free_queue):
            block = self.free_queue.pop()
            if not self.marks[block]:
                return block
            self.free_queue.push_first(block)
        return self.leaving.pop_front()

    def _evict(self, blocks: list[int]) -> None:
        """Forget the cached content of blocks that are being reused."""
        marks = self.marks
        self.num_evictions += len(blocks)
        if self.rows:
            blocks = self._evict_rows(blocks)
        self.index.evict(blocks)
        self.num_cached -= len(blocks)
        for block in blocks:
            if self.free_queue.watches:
                self.free_queue.forgot(block)
            if marks[block] & PINNED:
                self.pins.drop(block)
            marks[block] = 0

    def _evict_rows(self, blocks: list[int]) -> list[int]:
        """Forget those of these blocks that are parts of windows. Returns: the others."""
        for block in blocks:
            if self.marks[block] & WINDOW:
                self.num_cached -= sum(self.refs[each] > 0 for each in self.rows.find_of(block))
                self._unindex_row(block)
        return [block for block in blocks if self.marks[block]]

    def _unmark(self, block: int) -> None:
        """Clear the marks of a block that leaves the index without being reused."""
        if self.marks[block] & PINNED:
            self.pins.drop(block)
        self.marks[block] = 0

    def _note_peak(self) -> None:
        in_use = self.num_in_use
        if in_use > self.peak_in_use:
            self.peak_in_use = in_use

    def check(self) -> None:
        """Check that counts, queue, marks and index agree. Raises: AssertionError."""
        self.free_queue.check()
        self.leaving.check()
        self.index.check()
        self.rows.check()
        self.pins.check()
        unreferenced = [block for block, refs in enumerate(self.refs) if refs == 0]
        assert min(self.refs) >= 0, f"a reference count is {min(self.refs)}"
        queued = [*self.free_queue, *self.pins.aside, *self.leaving]
        assert sorted(queued) == unreferenced, (
            f"{len(queued)} blocks queued, {len(unreferenced)} unreferenced"
        )
        assert len(queued) == self.num_free, f"{len(queued)} blocks queued, {self.num_free} counted"
        indexed = {block for block, mark in enumerate(self.marks) if mark & INDEXED}
        assert indexed == {entry.block for entry in self.index}, f"{len(indexed)} marked as indexed"
        in_rows = {block for row in self.rows for block in row}
        windows = {block for block, mark in enumerate(self.marks) if mark & WINDOW}
        assert in_rows == windows, f"{len(in_rows)} blocks in rows of windows, {len(windows)} marked"
        bare = [block for block, mark in enumerate(self.marks) if mark and not mark & CACHED]
        assert not bare, f"block {bare[0]} has marks {self.marks[bare[0]]} but is not indexed"
        cached = sum(1 for block in unreferenced if block in indexed or block in windows)
        assert cached == self.num_cached, f"{cached} blocks are cached, {self.num_cached} counted"
        pairs = list(zip(self.refs, self.idle_refs, strict=True))
        assert all(0 <= idle <= refs for refs, idle in pairs), "more idle references than references"
        idle = sum(refs == idle > 0 for refs, idle in pairs)
        assert idle == self.num_idle, f"{idle} blocks are idle sequences' alone, {self.num_idle} counted"
        assert self.num_in_use <= self.peak_in_use <= self.num_blocks, f"peak {self.peak_in_use}"
