"""Slow twin of the pins: times in a dict, looked at one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from .naive_orders import NaiveLRU


class NaivePins:
    """ends: block -> when its pin is over, its ttl. since: owners of live pins, by when they came to be that.
    aside: queued blocks passed over, in that order."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit, self.clock = limit, clock
        self.ends: dict[int, tuple[float, float]] = {}
        self.owners: dict[int, str | None] = {}
        self.since: list[str | None] = []
        self.aside: list[int] = []
        self.refused = 0

    def live(self) -> set[int]:
        self.ends = {block: pin for block, pin in self.ends.items() if self.clock() < pin[0]}
        held = {self.owners[block] for block in self.ends}
        self.since = [owner for owner in self.since if owner in held]
        return set(self.ends)

    def pin(self, block: int, ttl_s: float, owner: str | None = None) -> None:
        live = self.live()
        if block in live:
            end, longest = self.ends[block]
            self.ends[block] = max(end, self.clock() + ttl_s), max(longest, ttl_s)
        elif len(live) < self.limit or self.gives_way(owner):
            self.ends[block] = self.clock() + ttl_s, ttl_s
            self.owners[block] = owner
            self.since += [owner] if owner not in self.since else []
        else:
            self.refused += 1

    def gives_way(self, owner: str | None) -> bool:
        """The last pin of the owner that has most, for one that has less than an equal part. Of owners that
        have as many the one that has had some for longest."""
        held = Counter(self.owners[block] for block in self.ends)
        if held[owner] >= self.limit // len(held.keys() | {owner}):
            return False
        most = max(self.since, key=lambda each: held[each])
        del self.ends[[block for block in self.ends if self.owners[block] == most][-1]]
        self.refused += 1
        return True

    def refresh(self, blocks: Sequence[int]) -> None:
        for block in self.live() & set(blocks):
            end, ttl_s = self.ends[block]
            self.ends[block] = max(end, self.clock() + ttl_s), ttl_s

    def take(self, order: NaiveLRU) -> int:
        live = self.live()
        due = [block for block in self.aside if block not in live]
        if due:
            self.aside.remove(due[0])
            return due[0]
        while order.sequence():
            block = order.take()
            if block not in live:
                return block
            self.aside.append(block)
        return self.aside.pop(0)

    def sequence(self, order: NaiveLRU) -> list[int]:
        live = self.live()
        aside, queued = self.aside, order.sequence()
        return (
            [block for block in aside if block not in live]
            + [block for block in queued if block not in live]
            + [block for block in aside if block in live]
            + [block for block in queued if block in live]
        )
