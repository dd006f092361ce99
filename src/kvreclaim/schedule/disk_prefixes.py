"""Compressed prefixes on disk: which are there, which are on their way up, and who waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic

from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.snapshot_key import SnapshotKey, length_in


@dataclass(slots=True)
class PendingLookup:
    """A waiting sequence's disk lookup: what it waits for, until when, and whether a miss is known."""

    key: SnapshotKey
    deadline: float
    is_missed: bool = False


class DiskPrefixIndex(Generic[Seq]):
    """Decides what is read; the caller reads it (`take_wanted`) and says what came of it (`arrived`).

    Args:
        wait_s:   seconds that a sequence waits, by tokens that it need not compute
        is_worth: (bytes, tokens): whether reading takes less time than computing
        clock:    seconds, never backwards
    """

    def __init__(
        self,
        wait_s: Callable[[int], float],
        is_worth: Callable[[int, int], bool],
        clock: Callable[[], float],
    ) -> None:
        self._wait_s, self._is_worth, self._clock = wait_s, is_worth, clock
        self._known: dict[str, int] = {}
        self._coming: set[SnapshotKey] = set()
        self._asked: dict[int, PendingLookup] = {}
        self._found: dict[int, SnapshotKey | None] = {}
        self._wanted: list[SnapshotKey] = []

    def __contains__(self, key: SnapshotKey) -> bool:
        return key.name in self._known

    @property
    def num_files(self) -> int:
        """Files that may be read."""
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Bytes of these files."""
        return sum(self._known.values())

    @property
    def num_coming(self) -> int:
        """Files that are being read."""
        return len(self._coming)

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for one."""
        return sum(self._is_waiting(asked) for asked in self._asked.values())

    def know(self, files: Iterable[tuple[str, int]]) -> None:
        """Files of these names, of so many bytes, may be read from now on."""
        self._known.update(files)

    def forget(self, names: Iterable[str]) -> None:
        """They are gone."""
        for name in names:
            self._known.pop(name, None)

    def clear(self) -> None:
        """All are gone; what is on its way is of no use."""
        self._known.clear()
        self._coming.clear()
        self._wanted.clear()

    def ask(self, seq: Seq) -> bool:
        """Have its snapshot read, if one is there and worth it. To be called as often as one likes: it is
        read once. Returns: whether it is on its way."""
        if (asked := self._asked.get(seq.seq_id)) is not None:
            return asked.key in self._coming
        key = self.find(seq)
        num_bytes = None if key is None else self._known.get(key.name)
        if key is None or num_bytes is None:
            return False
        num_tokens = key.num_tokens
        if seq.max_prefix_hit is not None and seq.max_prefix_hit < num_tokens:
            return False
        if key not in self._coming:
            if not self._is_worth(num_bytes, num_tokens):
                return False
            self._coming.add(key)
            self._wanted.append(key)
        self._asked[seq.seq_id] = PendingLookup(key, self._clock() + self._wait_s(num_tokens))
        return True

    def find(self, seq: Seq) -> SnapshotKey | None:
        """The key of the longest that a sequence that waits may begin with; where it has a lineage, of those
        that were there when it came."""
        if seq.lineage is None:
            key = seq.snapshot_key
            return key if key is not None and key.is_lasting else None
        if seq.seq_id not in self._found:
            self._found[seq.seq_id] = self._longest(seq.lineage) if seq.lineage.is_lasting else None
        return self._found[seq.seq_id]

    def _longest(self, lineage: SnapshotKey) -> SnapshotKey | None:
        lengths = sorted({n for name in self._known if (n := length_in(name)) <= lineage.num_tokens})
        found = [
            replace(lineage, has_past=has_past).of_first(length)
            for has_past in (False, True)
            for length, name in zip(lengths, replace(lineage, has_past=has_past).names(lengths), strict=True)
            if name in self._known
        ]
        return max(found, key=lambda key: key.num_tokens, default=None)

    def must_wait(self, seq_id: int) -> bool:
        """Whether a sequence that waits is to go on waiting."""
        asked = self._asked.get(seq_id)
        return asked is not None and self._is_waiting(asked)

    def has_missed(self, seq_id: int) -> bool:
        """Whether nothing will come for a sequence that has asked; said once."""
        asked = self._asked.get(seq_id)
        if asked is None or asked.is_missed or asked.key in self._coming:
            return False
        asked.is_missed = True
        return True

    def leave(self, seq_id: int) -> None:
        """A sequence has begun, or is gone; what comes later is there for others."""
        self._asked.pop(seq_id, None)
        self._found.pop(seq_id, None)

    def take_wanted(self) -> list[SnapshotKey]:
        """Keys of files that are to be read."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def arrived(self, key: SnapshotKey) -> bool:
        """It has been read, or could not be. Returns: whether it is still wanted."""
        is_wanted = key in self._coming
        self._coming.discard(key)
        return is_wanted

    def _is_waiting(self, asked: PendingLookup) -> bool:
        return asked.key in self._coming and self._clock() < asked.deadline
