"""Pins: cached blocks with delayed reuse, bounded in blocks and in time; never a lock."""

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
    """Return per leading full block the longest time of the retentions that cover it."""
    ends = sorted((kept.num_tokens // block_size, kept.ttl_s) for kept in retention)
    begin = 0
    for i, (end, _) in enumerate(ends):
        longest = max(ttl_s for _, ttl_s in ends[i:])
        yield from (longest for _ in range(begin, end))
        begin = end


class Pins:
    """Pinned blocks, their expiry times, and the pinned blocks that were skipped for reuse.

    A pinned block is in the eviction order like any other. When it is next for reuse, it is skipped and
    kept aside with a sequence number. If its pin ends first, it is reused next, as without a pin. If no
    other block is left, skipped blocks are reused in the order of their numbers. So a pin never delays
    other blocks, no operation scans the pool, and the pool never blocks.

    An owner may use the whole limit while no other owner needs it. If the limit is reached, an owner with
    less than an equal share replaces the last pin of the owner with most pins.

    The cost of skipping a block is amortised by the release that queued it: everything is O(log pins)
    amortised, and O(owners) for a pin beyond the limit.

    Args:
        marks: the pool's marks; this class sets PINNED
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
        """Pin an indexed block for ttl_s from now on. Of two pins of a block the later expiry and the first
        owner hold.

        now: the result of expire, the same for all blocks of a chain, so that no pin outlives the pin of
        the block before it. Returns: whether it is pinned; False if the limit is reached.
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
        """Return whether there is room for a pin of this owner, if need be by ending another owner's pin."""
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
        """Renew the live pins of blocks that were hit."""
        now = self.expire()
        for block in blocks:
            ttl_s = self.ttl_s.get(block)
            if ttl_s is not None:
                self._ends.push(block, max(now + ttl_s, self._ends.key(block)))

    def expire(self) -> float:
        """End expired pins. Returns: the current time."""
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
        """Remove a skipped block that is referenced again."""
        del self.aside[block]
        (self._kept if block in self._kept else self._due).remove(block)

    def take(self, order: EvictionOrder) -> int:
        """Take the next block for reuse, from the skipped ones and the eviction order. One must exist."""
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
        """Check that marks, times and skipped blocks agree. Raises: AssertionError."""
        for heap in (self._ends, self._kept, self._due):
            heap.check()
        marked = {block for block, mark in enumerate(self._marks) if mark & PINNED}
        assert marked == set(self.ttl_s) == set(self._ends), f"{len(marked)} marked, {len(self)} pinned"
        assert len(self) <= self.limit, f"{len(self)} pins, {self.limit} allowed"
        owned = {block: owner for owner, blocks in self._owned.items() for block in blocks}
        assert owned == self._owner, f"{len(owned)} owned by a tenant, {len(self._owner)} have an owner"
        assert owned.keys() == marked, f"{len(owned)} owned, {len(marked)} marked"
        assert all(self._owned.values()), "an owner of nothing"
        assert set(self._kept) == {block for block in self.aside if block in marked}, "kept: not the pinned"
        assert set(self._due) == set(self.aside) - marked, "due: not those whose pins ended"
