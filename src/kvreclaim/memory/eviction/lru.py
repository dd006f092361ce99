"""Least recently used first: the order, and the queue of blocks without references that every order is made
of."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import ClassVar

from kvreclaim.memory.eviction.base import EvictionOrder


class FreeQueue:
    """A doubly linked list of block ids inside two integer arrays; every operation is O(1).

    Slot num_blocks is the sentinel that closes the ring: its successor is the head (next to be
    reused), its predecessor the tail. A block that is not queued is its own successor.
    """

    __slots__ = ("_next", "_num_blocks", "_prev", "_size")

    def __init__(self, num_blocks: int, *, filled: bool = True) -> None:
        """Queue every block, in ascending order, or none."""
        self._num_blocks = num_blocks
        if not filled:
            self._next = array("i", range(num_blocks + 1))
            self._prev = array("i", range(num_blocks + 1))
            self._size = 0
            return
        self._next = array("i", range(1, num_blocks + 2))
        self._next[num_blocks] = 0
        self._prev = array("i", range(-1, num_blocks))
        self._prev[0] = num_blocks
        self._size = num_blocks

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return self._next[block] != block

    def __iter__(self) -> Iterator[int]:
        """Iterate from head to tail. Valid only while the queue is not changed."""
        block = self._next[self._num_blocks]
        while block != self._num_blocks:
            yield block
            block = self._next[block]

    def push_back(self, block: int) -> None:
        """Append a block that is not queued."""
        links, sentinel = self._next, self._num_blocks
        assert links[block] == block, f"block {block} is queued already"
        tail = self._prev[sentinel]
        links[tail] = block
        links[block] = sentinel
        self._prev[block] = tail
        self._prev[sentinel] = block
        self._size += 1

    def push_front(self, block: int) -> None:
        """Put a block that is not queued before all others."""
        links, sentinel = self._next, self._num_blocks
        assert links[block] == block, f"block {block} is queued already"
        head = links[sentinel]
        links[block], self._prev[block] = head, sentinel
        self._prev[head] = links[sentinel] = block
        self._size += 1

    def pop_front(self) -> int:
        """Take the least recently used block. The queue must not be empty."""
        block = self._next[self._num_blocks]
        assert block != self._num_blocks, "the queue is empty"
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Remove a queued block from any place."""
        after, before = self._next[block], self._prev[block]
        assert after != block, f"block {block} is not queued; {self._size} blocks are"
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = block
        self._size -= 1

    def check(self) -> None:
        """Walk the ring both ways. Raises AssertionError."""
        seen, before = 0, self._num_blocks
        for block in self:
            assert self._prev[block] == before, f"block {block}: prev {self._prev[block]}, not {before}"
            before, seen = block, seen + 1
            assert seen <= self._num_blocks, f"more than {self._num_blocks} blocks in the ring"
        tail = self._prev[self._num_blocks]
        assert tail == before, f"the tail is {tail}, the last block reached is {before}"
        assert seen == self._size, f"{seen} blocks in the ring, size {self._size}"
        unqueued = sum(1 for block in range(self._num_blocks) if self._next[block] == block)
        assert seen + unqueued == self._num_blocks, f"{seen} + {unqueued} != {self._num_blocks}"


class LRU(FreeQueue, EvictionOrder):
    """Blocks are reused in the order of release, whether they cache something or not.

    A block has no state but its place, so none can become stale. Use this order unless a measurement of your
    traffic favours another one. A scan of prompts that never come back pushes out
    everything else.

    Source: vLLM's free block queue (arXiv 2309.06180). Cost: O(1) per operation, 8 bytes per block.
    """

    __slots__ = ()
    name: ClassVar[str] = "lru"
    watches: ClassVar[bool] = False

    push = FreeQueue.push_back
    push_first = FreeQueue.push_front
    pop = FreeQueue.pop_front

    def entered(self, block: int, priority: int) -> None:
        """Makes no difference."""

    def used(self, block: int, priority: int) -> None:
        """Makes no difference."""

    def forgot(self, block: int) -> None:
        """Do nothing: the block keeps its place."""
