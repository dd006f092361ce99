"""Blocks of less important requests first."""

from __future__ import annotations

from typing import ClassVar

from kvreclaim.memory.eviction.ranked import Ranked


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
