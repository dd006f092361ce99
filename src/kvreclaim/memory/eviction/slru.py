"""Segmented least recently used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvreclaim.memory.eviction.base import EvictionOrder
from kvreclaim.memory.eviction.lru import FreeQueue

PROTECTED_FRACTION = 0.2


class SLRU(EvictionOrder):
    """Blocks that cache nothing go first, then cached ones that no request has come upon again, then
    those that one has; each segment in the order of release.

    At most 0.2 of the pool is protected: what is beyond, least recently used first, goes back to the
    end of the first segment and must prove itself anew. So one pass of prompts that never come back
    cannot push out what is shared, and what is not shared any more does not stay for ever.

    Source: Karedla, Love and Wherry, Caching strategies to improve disk system performance, IEEE
    Computer 27(3), 1994. Cost: O(1) per operation, 25 bytes per block.
    """

    __slots__ = ("_blank", "_caches", "_limit", "_probation", "_protected", "_proven")
    name: ClassVar[str] = "slru"

    def __init__(self, num_blocks: int) -> None:
        self._blank = FreeQueue(num_blocks)
        self._probation = FreeQueue(num_blocks, filled=False)
        self._protected = FreeQueue(num_blocks, filled=False)
        self._limit = int(PROTECTED_FRACTION * num_blocks)
        self._caches = bytearray(num_blocks)
        self._proven = bytearray(num_blocks)

    def push(self, block: int) -> None:
        if not self._caches[block]:
            self._blank.push_back(block)
        elif not self._proven[block]:
            self._probation.push_back(block)
        else:
            self._protected.push_back(block)
            if len(self._protected) > self._limit:
                self._probation.push_back(self._protected.pop_front())

    def push_first(self, block: int) -> None:
        self._blank.push_front(block)

    def pop(self) -> int:
        return next(segment for segment in self._segments() if len(segment)).pop_front()

    def remove(self, block: int) -> None:
        next(segment for segment in self._segments() if block in segment).remove(block)

    def entered(self, block: int, priority: int) -> None:
        self._caches[block] = 1
        self._proven[block] = 0

    def used(self, block: int, priority: int) -> None:
        self._proven[block] = 1

    def forgot(self, block: int) -> None:
        self._caches[block] = 0
        if block in self:
            self.remove(block)
            self._blank.push_back(block)

    def __len__(self) -> int:
        return sum(map(len, self._segments()))

    def __contains__(self, block: int) -> bool:
        return any(block in segment for segment in self._segments())

    def __iter__(self) -> Iterator[int]:
        for segment in self._segments():
            yield from segment

    def _segments(self) -> tuple[FreeQueue, FreeQueue, FreeQueue]:
        """Segments in the order of reuse."""
        return self._blank, self._probation, self._protected

    def check(self) -> None:
        for segment in self._segments():
            segment.check()
        assert len(set(self)) == len(self), f"{len(self)} blocks queued, {len(set(self))} different ones"
        assert len(self._protected) <= self._limit, f"{len(self._protected)} protected, {self._limit} may be"
        assert all(self._caches[block] for block in (*self._probation, *self._protected)), "caches nothing"
