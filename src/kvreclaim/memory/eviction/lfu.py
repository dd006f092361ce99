"""Least frequently used first."""

from __future__ import annotations

from array import array
from typing import ClassVar

from kvreclaim.memory.eviction.ranked import Ranked


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
