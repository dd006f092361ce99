"""Greedy dual size frequency."""

from __future__ import annotations

from array import array
from itertools import count
from typing import ClassVar

from kvreclaim.memory.eviction.ranked import Ranked

EVEN_CONTEXT = 16_384


class GDSF(Ranked):
    """rank = age + uses · cost, at least the ranks of the blocks behind it in its chain.

    uses: requests that came upon the block since it was cached. cost: of computing the block anew, in
    units of its linear layers: 1 + position / 16,384, because attending to about that many tokens (6
    hidden sizes, for a usual transformer) takes as long as the linear layers. All blocks have the same
    size. age: the rank of the block reused last, so that everything that is used again outlives what
    was popular once. A block inherits the ranks behind it since without it those could not be hit.

    For mixed traffic, popular prefixes that change beside long conversations.

    Source: Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy,
    HP Labs HPL-98-69R1. Cost: O(log n), 48 bytes per block.
    """

    __slots__ = (
        "_age",
        "_content",
        "_contents",
        "_depth",
        "_inherited",
        "_parent",
        "_rank",
        "_uses",
        "_weight",
    )
    name: ClassVar[str] = "gdsf"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        zeros = bytes(8 * num_blocks)
        self._weight = block_size / EVEN_CONTEXT
        self._age = 0.0
        self._uses = array("q", zeros)
        self._depth = array("q", zeros)
        self._inherited = array("d", zeros)
        self._rank = array("d", zeros)
        self._contents = count(1)
        self._content = array("q", zeros)
        self._parent: list[tuple[int, int] | None] = [None] * num_blocks

    def entered(self, block: int, parent: int | None, priority: int) -> None:
        super().entered(block, parent, priority)
        self._uses[block] = 1
        self._inherited[block] = 0.0
        self._content[block] = next(self._contents)
        self._depth[block] = 0 if parent is None else self._depth[parent] + 1
        self._parent[block] = None if parent is None else (parent, self._content[parent])

    def used(self, block: int, priority: int) -> None:
        self._uses[block] += 1

    def rank(self, block: int) -> float:
        own = self._age + self._uses[block] * (1 + self._depth[block] * self._weight)
        rank = self._rank[block] = max(own, self._inherited[block])
        match self._parent[block]:
            case (parent, content) if self._content[parent] == content:
                self._inherited[parent] = max(self._inherited[parent], rank)
        return rank

    def reused(self, block: int) -> None:
        self._age = max(self._age, self._rank[block])
        super().reused(block)
