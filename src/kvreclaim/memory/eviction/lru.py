"""Least recently used first."""

from __future__ import annotations

from typing import ClassVar

from kvreclaim.memory.eviction.base import EvictionOrder
from kvreclaim.memory.free_queue import FreeQueue


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
