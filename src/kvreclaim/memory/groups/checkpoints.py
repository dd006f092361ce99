"""Slots of states, of which some are kept behind full blocks: the checkpoints that prefix hits end at.

The least recently used ones give way (as in SGLang's MambaRadixCache; vLLM keeps one for each aligned step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvreclaim.memory.groups.state_slots import StateCounts, StateSlots
from kvreclaim.memory.prefix.index import Entry, PrefixIndex


class Checkpoints:
    """Which slots are free, and which are kept behind which blocks. A slot is free when nobody refers to it.

    version: grows whenever an answer of fit may have changed
    """

    def __init__(self, sizes: StateSlots, index: PrefixIndex) -> None:
        self.sizes, self.version = sizes, 0
        self._index = index
        self._free = list(range(sizes.num_slots))[::-1]
        self._refs = [0] * sizes.num_slots
        self._kept: dict[int, tuple[Entry, int]] = {}
        """By the entry's serial; the least recently used first."""

    # Slots.

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A slot for one holder. A checkpoint gives way if none is free."""
        while not self._free:
            assert self._kept, f"all {self.sizes.num_slots} state slots are in use"
            self.drop(next(iter(self._kept)))
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def share(self, slot: int) -> int:
        """The same slot, for one more."""
        self._refs[slot] += 1
        return slot

    def release(self, *slots: int) -> None:
        for slot in slots:
            self._refs[slot] -= 1
            if not self._refs[slot]:
                self._free.append(slot)

    # Kept ones.

    def __len__(self) -> int:
        return len(self._kept)

    def fit(self, entries: Sequence[Entry], most: int) -> int:
        """How many of the first `most` blocks end at a checkpoint."""
        return next((n for n in range(most, 0, -1) if entries[n - 1].serial in self._kept), 0)

    def find(self, entry: Entry) -> int | None:
        """The slot of the state that is kept behind this block."""
        found = self._kept.get(entry.serial)
        return None if found is None else found[1]

    def hit(self, entry: Entry) -> int:
        """This slot, shared with one more, and behind the others in the order of use."""
        self._kept[entry.serial] = _, slot = self._kept.pop(entry.serial)
        return self.share(slot)

    def keep(self, entry: Entry, slot: int) -> bool:
        """Keep this slot behind a block. Returns: False if one is kept there already, or none at all."""
        if entry.serial in self._kept or not self.sizes.num_checkpoints:
            return False
        if len(self._kept) >= self.sizes.num_checkpoints:
            gone = (serial for serial, (old, _) in self._kept.items() if not self._index.is_live(old))
            self.drop(next(gone, next(iter(self._kept))))
        self._kept[entry.serial] = entry, self.share(slot)
        self.version += 1
        return True

    def drop(self, serial: int | None) -> None:
        """Keep none behind this block any more."""
        if serial in self._kept:
            self.release(self._kept.pop(serial)[1])
            self.version += 1

    @property
    def counts(self) -> StateCounts:
        """Slots by what holds them, now."""
        cached = sum(self._refs[slot] == 1 for _, slot in self._kept.values())
        free = len(self._free)
        return StateCounts(self.sizes.num_slots - free - cached, cached, free, len(self._kept))

    def check(self, held: Iterable[int]) -> None:
        """References agree with these of others and those of checkpoints. Raises AssertionError."""
        found = Counter(held)
        found.update(slot for _, slot in self._kept.values())
        counted = {slot: count for slot, count in enumerate(self._refs) if count}
        assert found == counted, f"state slots {dict(found)}, counted {counted}"
        assert len(self._free) + len(counted) == self.sizes.num_slots, "a state slot is lost"
        assert len(self._kept) <= self.sizes.num_checkpoints, "too many checkpoints"
