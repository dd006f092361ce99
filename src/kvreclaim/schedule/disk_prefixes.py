"""Compressed prefixes on disk: available files, reads in progress, and the sequences waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic

from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.snapshot_key import SnapshotKey, length_in


@dataclass(slots=True)
class PendingLookup:
    """A waiting sequence's disk lookup: its file, its deadline, and whether a miss is known."""

    key: SnapshotKey
    deadline: float
    is_missed: bool = False


class DiskPrefixIndex(Generic[Seq]):
    """Decides what is read; the caller reads it (`take_wanted`) and reports the result (`arrived`).

    Args:
        wait_s:   seconds that a sequence waits, by the tokens it saves
        is_worth: (bytes, tokens): whether reading takes less time than computing
        clock:    seconds, monotonic
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
        self._lookups: dict[int, PendingLookup] = {}
        self._found: dict[int, SnapshotKey | None] = {}
        self._wanted: list[SnapshotKey] = []

    def __contains__(self, key: SnapshotKey) -> bool:
        return key.name in self._known

    @property
    def num_files(self) -> int:
        """Readable files."""
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Bytes of these files."""
        return sum(self._known.values())

    @property
    def num_coming(self) -> int:
        """Files being read."""
        return len(self._coming)

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for a file."""
        return sum(self._is_waiting(lookup) for lookup in self._lookups.values())

    def know(self, files: Iterable[tuple[str, int]]) -> None:
        """Add readable files with their sizes."""
        self._known.update(files)

    def forget(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            self._known.pop(name, None)

    def clear(self) -> None:
        """Remove all files; reads in progress become useless."""
        self._known.clear()
        self._coming.clear()
        self._wanted.clear()

    def ask(self, seq: Seq) -> bool:
        """Request the sequence's snapshot, if there is one and it is worth reading. Idempotent. Returns:
        whether it is being read."""
        if (lookup := self._lookups.get(seq.seq_id)) is not None:
            return lookup.key in self._coming
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
        self._lookups[seq.seq_id] = PendingLookup(key, self._clock() + self._wait_s(num_tokens))
        return True

    def find(self, seq: Seq) -> SnapshotKey | None:
        """Key of the longest snapshot with which a waiting sequence may start; with a lineage, only of those
        that existed when it arrived."""
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
        """Whether a waiting sequence has to keep waiting."""
        lookup = self._lookups.get(seq_id)
        return lookup is not None and self._is_waiting(lookup)

    def has_missed(self, seq_id: int) -> bool:
        """Whether a requested snapshot will not come; true only once."""
        lookup = self._lookups.get(seq_id)
        if lookup is None or lookup.is_missed or lookup.key in self._coming:
            return False
        lookup.is_missed = True
        return True

    def leave(self, seq_id: int) -> None:
        """Forget a sequence that has started or is gone; files read later serve others."""
        self._lookups.pop(seq_id, None)
        self._found.pop(seq_id, None)

    def take_wanted(self) -> list[SnapshotKey]:
        """Return the keys of files to read."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def arrived(self, key: SnapshotKey) -> bool:
        """Record the end of a read. Returns: whether the file is still needed."""
        is_wanted = key in self._coming
        self._coming.discard(key)
        return is_wanted

    def _is_waiting(self, lookup: PendingLookup) -> bool:
        return lookup.key in self._coming and self._clock() < lookup.deadline
