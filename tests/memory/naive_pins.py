"""Slow twin of the pins: times in a dict, looked at one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .naive_orders import NaiveLRU


class NaivePins:
    """ends: block -> when its pin is over, its ttl. aside: queued blocks passed over, in that order."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit, self.clock = limit, clock
        self.ends: dict[int, tuple[float, float]] = {}
        self.aside: list[int] = []
        self.refused = 0

    def live(self) -> set[int]:
        self.ends = {block: pin for block, pin in self.ends.items() if self.clock() < pin[0]}
        return set(self.ends)

    def pin(self, block: int, ttl_s: float) -> None:
        live = self.live()
        if block in live:
            end, longest = self.ends[block]
            self.ends[block] = max(end, self.clock() + ttl_s), max(longest, ttl_s)
        elif len(live) >= self.limit:
            self.refused += 1
        else:
            self.ends[block] = self.clock() + ttl_s, ttl_s

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
