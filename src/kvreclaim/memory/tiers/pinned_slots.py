"""Slots that somebody may be reading or writing when they are given back."""

from __future__ import annotations

from collections import Counter


class PinnedSlots:
    """Which slots are free. One that is given back while it is pinned is free when the last pin goes."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._pins: Counter[int] = Counter()
        self._given_back: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot; None: there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Its holder has no use for it."""
        if slot in self._pins:
            self._given_back.add(slot)
        else:
            self._free.append(slot)

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pins

    def pin(self, slot: int) -> None:
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._given_back:
                self._given_back.remove(slot)
                self._free.append(slot)

    def check(self, held: list[int]) -> None:
        """Raises AssertionError unless each slot is held once, free, or about to be."""
        slots = sorted([*self._free, *self._given_back, *held])
        assert slots == list(range(self.num_slots)), f"slots of states: {slots} of {self.num_slots}"
