"""Least important first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from kvreclaim.memory.block_heap import BlockHeap
from kvreclaim.memory.eviction.base import EvictionOrder
from kvreclaim.memory.eviction.lru import FreeQueue


class Priority(EvictionOrder):
    """Blocks that cache nothing go first, in the order of release; then cached ones by descending priority
    number, the lowest of the requests that came upon the block since it was cached; of equal numbers the
    one released first. As everywhere, a lower number is more important.

    For tenants or jobs that must not push each other out: batch work at a high number leaves what
    interactive requests have cached alone. Among equals it is least recently used first, so without
    priorities it is lru. It does not age.

    Source: the request priorities of vLLM's scheduler, applied to what requests leave behind.
    Cost: O(log n) per operation, amortised; 8 bytes per block.
    """

    __slots__ = ("_blank", "_cached", "_number", "_releases")
    name: ClassVar[str] = "priority"

    def __init__(self, num_blocks: int) -> None:
        self._blank = FreeQueue(num_blocks)
        self._cached: BlockHeap[tuple[int, int]] = BlockHeap()
        self._number: list[int | None] = [None] * num_blocks  # None: caches nothing
        self._releases = count()

    def push(self, block: int) -> None:
        number = self._number[block]
        if number is None:
            self._blank.push_back(block)
        else:
            self._cached.push(block, (-number, next(self._releases)))

    def push_first(self, block: int) -> None:
        self._blank.push_front(block)

    def pop(self) -> int:
        return self._blank.pop_front() if len(self._blank) else self._cached.pop()

    def remove(self, block: int) -> None:
        (self._cached if block in self._cached else self._blank).remove(block)

    def entered(self, block: int, priority: int) -> None:
        self._number[block] = priority

    def used(self, block: int, priority: int) -> None:
        number = self._number[block]
        assert number is not None, f"block {block} is used but caches nothing"
        self._number[block] = min(number, priority)

    def forgot(self, block: int) -> None:
        self._number[block] = None
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
            assert self._number[block] is not None, f"block {block} is ranked but caches nothing"
            assert block not in self._blank, f"block {block} is queued twice"
