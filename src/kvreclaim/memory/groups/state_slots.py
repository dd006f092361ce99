"""Slots for states of recurrent layers: the map that each tier has, and the sizes of the device's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class StateSlots(Generic[Key]):
    """The slots of one tier: on the device, on the host, or in a file.

    A slot is free when it has no references: of sequences, of copies under way, and of the block behind which
    its state is kept. Kept states are evicted: first those that can't be found, then the least recently used.

    Args:
        num_slots: 0: the tier has none
        max_kept:  states kept behind blocks at most; None: as many as slots
        is_live:   whether the state behind a block can be found; None: each can
    """

    def __init__(
        self, num_slots: int, max_kept: int | None = None, is_live: Callable[[Key], bool] | None = None
    ) -> None:
        self.num_slots, self.max_kept = num_slots, num_slots if max_kept is None else max_kept
        self.version = 0
        """Grows whenever the kept states change."""
        self._is_live = is_live or (lambda _: True)
        self._free = list(range(num_slots))[::-1]
        self._refs = [0] * num_slots
        self._kept: dict[Key, int] = {}
        """The least recently used first."""

    # References.

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot with one reference. A kept state without other references is evicted if none is free. None:
        all are in use."""
        if not self._free:
            self._evict([key for key, slot in self._kept.items() if self._refs[slot] == 1])
        if not self._free:
            return None
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def share(self, slot: int) -> int:
        """Add a reference. Returns: the slot."""
        self._refs[slot] += 1
        return slot

    def release(self, *slots: int) -> None:
        """Drop one reference each."""
        for slot in slots:
            self._refs[slot] -= 1
            if not self._refs[slot]:
                self._free.append(slot)

    # Kept states.

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    @property
    def num_live(self) -> int:
        """Kept states that can be found."""
        return sum(map(self._is_live, self._kept))

    def find(self, key: Key) -> int | None:
        """Return the slot of the state behind this block."""
        return self._kept.get(key)

    def use(self, key: Key) -> int:
        """Return the slot of a kept state, which becomes the most recently used one."""
        slot = self._kept[key] = self._kept.pop(key)
        return slot

    def keep(self, key: Key, slot: int) -> bool:
        """Keep a slot behind a block, which takes over one reference. Returns: False if a state is kept there
        already, or none may be kept; the reference is dropped."""
        if key in self._kept or not self.max_kept:
            self.release(slot)
            return False
        if len(self._kept) >= self.max_kept:
            self._evict(list(self._kept))
        self._kept[key] = slot
        self.version += 1
        return True

    def drop(self, key: Key | None) -> None:
        """Forget the state behind this block, if one is kept."""
        if key is not None and key in self._kept:
            self.release(self._kept.pop(key))
            self.version += 1

    def drop_slots(self, slots: Iterable[int]) -> None:
        """Forget the kept states in these slots."""
        for key in [key for key, slot in self._kept.items() if slot in slots]:
            self.drop(key)

    def drop_oldest(self) -> None:
        """Forget the least recently used state, even if its slot has other references."""
        assert self._kept, f"all {self.num_slots} state slots are in use"
        self.drop(next(iter(self._kept)))

    def _evict(self, keys: list[Key]) -> None:
        """Forget one of these kept states, if there are some."""
        self.drop(next((key for key in keys if not self._is_live(key)), keys[0] if keys else None))

    def reset(self, kept: Mapping[Key, int] | None = None) -> None:
        """Forget all kept states. kept: those of an unused map, the least recently used first"""
        for key in list(self._kept):
            self.drop(key)
        self._kept.update(kept or {})
        for slot in self._kept.values():
            self._refs[slot] = 1
        self._free = [slot for slot in self._free if not self._refs[slot]]

    @property
    def counts(self) -> StateCounts:
        """Slots by use, now."""
        cached = sum(self._refs[slot] == 1 for slot in self._kept.values())
        free = len(self._free)
        return StateCounts(self.num_slots - free - cached, cached, free, len(self._kept))

    def check(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless references agree with kept states and with `held`, all others."""
        found = Counter([*held, *self._kept.values()])
        counted = {slot: refs for slot, refs in enumerate(self._refs) if refs}
        assert found == counted, f"state slots {dict(found)}, counted {counted}"
        assert len(self._free) + len(counted) == self.num_slots, "a state slot is lost"
        assert len(self._kept) <= self.max_kept, f"{len(self._kept)} states kept, {self.max_kept} allowed"


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of a recurrent group on the device.

    num_slots:       in all: `each` for each running sequence, and the checkpoints
    num_checkpoints: slots kept for prefix hits at most
    interval:        tokens of a prompt between checkpoints; 0: none between
    each:            two at least; num_drafts: of these, for drafts
    """

    num_slots: int
    num_checkpoints: int = 0
    interval: int = 0
    each: int = 2
    num_drafts: int = 0

    @classmethod
    def of(
        cls,
        max_num_seqs: int,
        each: int = 2,
        checkpoints: int | None = None,
        interval: int = 0,
        num_drafts: int = 0,
    ) -> StateSizes:
        """each: slots of a running sequence; checkpoints: None: as many as sequences"""
        kept = max_num_seqs if checkpoints is None else checkpoints
        return cls(each * max_num_seqs + kept, kept, interval, each, num_drafts)


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Slots that sequences hold, that only prefix hits can use, and free ones; checkpoints: all that prefix
    hits can use."""

    in_use: int = 0
    cached: int = 0
    free: int = 0
    checkpoints: int = 0

    @property
    def slots(self) -> dict[str, int]:
        """Slots by state."""
        return {"in_use": self.in_use, "cached": self.cached, "free": self.free}


NO_STATES = StateCounts()


def most_sequences(room: int, each: int = 2, checkpoints: int | None = None) -> int:
    """Sequences that can run with room for this many slots; arguments as of StateSizes.of."""
    return room // (each + 1) if checkpoints is None else max(0, room - checkpoints) // each
