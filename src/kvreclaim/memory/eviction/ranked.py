"""Orders that rank every cached block: their base class, and two of them."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from kvreclaim.memory.block_heap import BlockHeap
from kvreclaim.memory.eviction.base import EvictionOrder
from kvreclaim.memory.free_queue import FreeQueue


class Ranked(EvictionOrder):
    """Blocks that cache nothing go first, in the order in which they were released; then the cached
    ones by ascending rank, of equal rank the one released first, which is the deeper one of a chain.

    A rank is taken when a block is queued and stays until it is referenced again. It must not be lower
    than that of the blocks behind it in its chain. Cost: O(log n) per operation, amortised.
    """

    __slots__ = ("_blank", "_cached", "_caches", "_releases")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._blank = FreeQueue(num_blocks)
        self._cached: BlockHeap[tuple[float, int]] = BlockHeap()
        self._caches = bytearray(num_blocks)
        self._releases = count()

    @abstractmethod
    def rank(self, block: int) -> float:
        """Rank of a cached block that is being queued; the lowest goes first."""

    def push(self, block: int) -> None:
        if self._caches[block]:
            self._cached.push(block, (self.rank(block), next(self._releases)))
        else:
            self._blank.push_back(block)

    def push_first(self, block: int) -> None:
        self._blank.push_front(block)

    def pop(self) -> int:
        return self._blank.pop_front() if len(self._blank) else self._cached.pop()

    def remove(self, block: int) -> None:
        (self._cached if block in self._cached else self._blank).remove(block)

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        self._caches[block] = 1

    def forgot(self, block: int) -> None:
        self._caches[block] = 0
        if block in self._cached:
            self._cached.remove(block)
            self._blank.push_back(block)

    def __len__(self) -> int:
        return len(self._blank) + len(self._cached)

    def __contains__(self, block: int) -> bool:
        return block in self._cached or block in self._blank

    def __iter__(self) -> Iterator[int]:
        yield from self._blank
        yield from self._cached

    def check(self) -> None:
        self._blank.check()
        self._cached.check()
        for block in self._cached:
            assert self._caches[block], f"block {block} is ranked but caches nothing"
            assert block not in self._blank, f"block {block} is queued twice"


class LFU(Ranked):
    """rank = requests that came upon the block since it was cached, the one that computed it included.

    For traffic whose popular prefixes stay the same: one-off prompts, however many, never push them
    out. It does not age: what was popular once stays until everything less popular is gone.

    Source: in-cache LFU as in arXiv 2110.11602, ties by recency. Cost: O(log n), 8 bytes per block.
    """

    __slots__ = ("_uses",)
    name: ClassVar[str] = "lfu"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._uses = array("q", bytes(8 * num_blocks))

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        super().entered(block, parent, priority)
        self._uses[block] = 1

    def used(self, block: int, priority: int) -> None:
        self._uses[block] += 1

    def rank(self, block: int) -> float:
        return self._uses[block]


class Priority(Ranked):
    """rank = -(the lowest priority number of the requests that came upon the block since it was cached);
    as everywhere, a lower number is more important.

    For tenants or jobs that must not push each other out: batch work at a high number leaves what
    interactive requests have cached alone. Among equals it is least recently used first, so without
    priorities it is lru. It does not age.

    Source: the request priorities of vLLM's scheduler, applied to what requests leave behind.
    Cost: O(log n), 8 bytes per block.
    """

    __slots__ = ("_number",)
    name: ClassVar[str] = "priority"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._number = [0] * num_blocks

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        super().entered(block, parent, priority)
        self._number[block] = priority

    def used(self, block: int, priority: int) -> None:
        self._number[block] = min(self._number[block], priority)

    def rank(self, block: int) -> float:
        return -self._number[block]
