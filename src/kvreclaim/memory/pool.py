"""The pool of physical blocks: reference counts, reuse order, and the index of what they hold."""

from __future__ import annotations

from collections.abc import Iterable

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.free_queue import FreeQueue
from kvreclaim.memory.prefix_index import Entry, Link, PrefixIndex


class BlockPool:
    """Every block is in use (references > 0) or queued for reuse; a queued block that is still
    indexed is cached: a prefix hit can take it back until it is reused.

    Every operation costs O(blocks it names), whatever the size of the pool.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex | None = None) -> None:
        if num_blocks < 1:
            raise InvalidArgumentError(
                f"num_blocks is {num_blocks}; a pool has at least 1 block; give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self.index = PrefixIndex(1) if index is None else index
        self.refs = [0] * num_blocks
        self.free_queue = FreeQueue(num_blocks)
        self.num_cached = 0
        self.num_evictions = 0
        self.peak_in_use = 0

    @property
    def num_free(self) -> int:
        """Blocks that allocate can give, cached ones included."""
        return len(self.free_queue)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - len(self.free_queue)

    def ref_count(self, block: int) -> int:
        return self.refs[block]

    def is_writable(self, block: int) -> bool:
        """Whether its one holder may change its bytes: nobody shares it, nobody can hit it."""
        return self.refs[block] == 1 and block not in self.index

    def allocate(self, n: int) -> list[int]:
        """Take the n least recently used blocks, one reference each; what they cached is forgotten.

        The caller has asked num_free first.
        """
        assert 0 <= n <= len(self.free_queue), f"{n} blocks wanted, {len(self.free_queue)} free"
        blocks = []
        for _ in range(n):
            block = self.free_queue.pop_front()
            if block in self.index:
                self.index.remove(block)
                self.num_cached -= 1
                self.num_evictions += 1
            self.refs[block] = 1
            blocks.append(block)
        self._note_peak()
        return blocks

    def touch(self, block: int) -> None:
        """Add a reference; a queued block leaves the queue."""
        if self.refs[block] == 0:
            self.free_queue.remove(block)
            if block in self.index:
                self.num_cached -= 1
            self._note_peak()
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> int:
        """Drop one reference each, in this order: what reaches 0 joins the tail of the queue.

        Returns: how many reached 0.
        """
        freed = 0
        for block in blocks:
            refs = self.refs[block] - 1
            assert refs >= 0, f"block {block} is released but not referenced"
            self.refs[block] = refs
            if refs == 0:
                self.free_queue.push_back(block)
                self.num_cached += block in self.index
                freed += 1
        return freed

    def enter(self, block: int, parent: Link, token_ids: list[int]) -> Entry | None:
        """Index a full block that is in use, whose content will not change any more.

        If an equal prefix is indexed already, that entry stays and this block is not indexed.
        An entry that has the same digest but is not the same prefix makes way.

        Returns: the entry that the chain goes on from; None if the parent is gone, because
        nothing after it could be reached.
        """
        assert self.refs[block] > 0, f"block {block} is indexed but not in use"
        if not self.index.is_live(parent):
            return None
        tokens = self.index.pack(token_ids)
        digest = self.index.digest(parent, tokens)
        entry = self.index.at(digest)
        if entry is not None:
            if self.index.follows(entry, parent, tokens):
                return entry
            if entry is parent:
                return None
            self.strip(entry.block)
        return self.index.add(parent, digest, tokens, block)

    def strip(self, block: int) -> None:
        """Forget what the block caches, if anything; it keeps its place and its references."""
        if block in self.index:
            self.index.remove(block)
            self.num_cached -= self.refs[block] == 0

    def clear_index(self) -> None:
        """Forget what every block caches."""
        self.index.clear()
        self.num_cached = 0

    def reset_peak(self) -> None:
        self.peak_in_use = self.num_in_use

    def _note_peak(self) -> None:
        in_use = self.num_blocks - len(self.free_queue)
        if in_use > self.peak_in_use:
            self.peak_in_use = in_use

    def check(self) -> None:
        """Counts, queue and index agree. Raises AssertionError."""
        self.free_queue.check()
        self.index.check()
        unreferenced = [block for block, refs in enumerate(self.refs) if refs == 0]
        assert min(self.refs) >= 0, f"a reference count is {min(self.refs)}"
        assert sorted(self.free_queue) == unreferenced, (
            f"{len(self.free_queue)} blocks queued, {len(unreferenced)} unreferenced"
        )
        cached = sum(1 for block in unreferenced if block in self.index)
        assert cached == self.num_cached, f"{cached} blocks are cached, {self.num_cached} counted"
        assert self.num_in_use <= self.peak_in_use <= self.num_blocks, f"peak {self.peak_in_use}"
