"""Pins: cached blocks that are reused later than others, bounded in blocks and in time; never a lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import isfinite

from kvreclaim.checks import check_int
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.block_heap import BlockHeap
from kvreclaim.memory.blocks import PINNED
from kvreclaim.memory.eviction.base import EvictionOrder

EVERYTHING = 2**31 - 1
"""Tokens of a retention that covers a request's answers, too."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the full blocks of the first num_tokens tokens, and snapshots of no more than these, for ttl_s
    seconds after their last hit."""

    num_tokens: int
    ttl_s: float

    def __post_init__(self) -> None:
        check_int("num_tokens of a retention", self.num_tokens, 0, field="num_tokens")
        if not isinstance(self.ttl_s, (int, float)) or not isfinite(self.ttl_s) or self.ttl_s <= 0:
            raise InvalidArgumentError(
                f"ttl_s of a retention is {self.ttl_s!r}; pass a finite number of seconds above 0."
            )


def ttls(retention: Sequence[Retention], block_size: int) -> Iterator[float]:
    """Per leading full block that a retention covers, the longest time that one keeps it."""
    ends = sorted((kept.num_tokens // block_size, kept.ttl_s) for kept in retention)
    begin = 0
    for i, (end, _) in enumerate(ends):
        longest = max(ttl_s for _, ttl_s in ends[i:])
        yield from (longest for _ in range(begin, end))
        begin = end


class Pins:
    """Which blocks are pinned, until when, and which of them have been passed over.

    A pinned block stands in the eviction order like any other. When its turn comes it is put aside
    with the number of its turn. If the pin ends first, the block's turn is the very next one, as it
    would have been; if nothing else is left to reuse, the blocks put aside go in the order of their
    turns. So a pin costs its place to nobody, no pool is ever scanned, and a pool is never stuck.

    Every owner may use all of the limit while nobody else wants it. One that finds it used up, and has less
    than an equal part, gets the place of the last pin of the owner that has most.

    Passing a block over is paid by the release that queued it: everything is O(log pins) amortised, and
    O(owners) for a pin beyond the limit.

    Args:
        marks: the pool's; PINNED is kept here
        limit: most blocks with a live pin, in use or not
        clock: seconds, never backwards
    """

    def __init__(self, marks: bytearray, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self.num_refused = 0
        self.aside: dict[int, int] = {}
        """Queued blocks whose turn has come while they were pinned, to the number of that turn."""
        self._marks, self._clock = marks, clock
        self.ttl_s: dict[int, float] = {}
        """Pinned blocks, to the time that a hit keeps them."""
        self._owner: dict[int, str | None] = {}
        self._owned: dict[str | None, dict[int, None]] = {}
        self._ends: BlockHeap[float] = BlockHeap()
        self._kept: BlockHeap[int] = BlockHeap()
        self._due: BlockHeap[int] = BlockHeap()
        self._turns = count()

    def __len__(self) -> int:
        return len(self.ttl_s)

    def pin(self, block: int, ttl_s: float, now: float, owner: str | None = None) -> bool:
        """Pin an indexed block for this long from now on; of two pins of a block the longer one holds, and
        the first one's owner.

        now: what expire said, once for all blocks of a chain, so that no pin of one outlives that of
        the block before it. Returns: whether it is pinned; if not, there were limit others.
        """
        ends, longest = now + ttl_s, ttl_s
        if block in self.ttl_s:
            ends, longest = max(ends, self._ends.key(block)), max(ttl_s, self.ttl_s[block])
        elif not self._make_room(owner):
            self.num_refused += 1
            return False
        else:
            self._owner[block] = owner
            self._owned.setdefault(owner, {})[block] = None
            if block in self.aside:
                self._due.remove(block)
                self._kept.push(block, self.aside[block])
        self.ttl_s[block] = longest
        self._ends.push(block, ends)
        self._marks[block] |= PINNED
        return True

    def _make_room(self, owner: str | None) -> bool:
        """Return whether there is room for a pin of this owner, if need be in place of another one's."""
        if len(self.ttl_s) < self.limit:
            return True
        owners = self._owned.keys() | {owner}
        if len(self._owned.get(owner, ())) >= self.limit // len(owners):
            return False
        most = max(self._owned.values(), key=len)
        self.drop(next(reversed(most)))
        self.num_refused += 1
        return True

    def refresh(self, blocks: Iterable[int]) -> None:
        """These blocks have been hit: the pins that still hold begin anew."""
        now = self.expire()
        for block in blocks:
            ttl_s = self.ttl_s.get(block)
            if ttl_s is not None:
                self._ends.push(block, max(now + ttl_s, self._ends.key(block)))

    def expire(self) -> float:
        """End the pins whose time is over. Returns: the time."""
        now = self._clock()
        while (first := self._ends.first()) is not None and first[0] <= now:
            self.drop(first[1])
        return now

    def drop(self, block: int) -> None:
        """End the pin of a block."""
        del self.ttl_s[block]
        self._ends.remove(block)
        owner = self._owner.pop(block)
        del self._owned[owner][block]
        if not self._owned[owner]:
            del self._owned[owner]
        self._marks[block] &= ~PINNED
        if block in self.aside:
            self._kept.remove(block)
            self._due.push(block, self.aside[block])

    def clear(self) -> None:
        """End all pins."""
        for block in list(self.ttl_s):
            self.drop(block)

    def take_back(self, block: int) -> None:
        """A block that was put aside is referenced again."""
        del self.aside[block]
        (self._kept if block in self._kept else self._due).remove(block)

    def take(self, order: EvictionOrder) -> int:
        """The block to be reused next, of those put aside and those in the order; there is one."""
        if not self._due:
            while len(order):
                block = order.pop()
                if not self._marks[block] & PINNED:
                    return block
                self.aside[block] = turn = next(self._turns)
                self._kept.push(block, turn)
        block = (self._due or self._kept).pop()
        del self.aside[block]
        return block

    def check(self) -> None:
        """Marks, times and what was put aside agree. Raises AssertionError."""
        for heap in (self._ends, self._kept, self._due):
            heap.check()
        marked = {block for block, mark in enumerate(self._marks) if mark & PINNED}
        assert marked == set(self.ttl_s) == set(self._ends), f"{len(marked)} marked, {len(self)} pinned"
        assert len(self) <= self.limit, f"{len(self)} pins, {self.limit} allowed"
        owned = {block: owner for owner, blocks in self._owned.items() for block in blocks}
        assert owned == self._owner, f"{len(owned)} owned by somebody, {len(self._owner)} have an owner"
        assert owned.keys() == marked, f"{len(owned)} owned, {len(marked)} marked"
        assert all(self._owned.values()), "an owner of nothing"
        assert set(self._kept) == {block for block in self.aside if block in marked}, "kept: not the pinned"
        assert set(self._due) == set(self.aside) - marked, "due: not those whose pins ended"
