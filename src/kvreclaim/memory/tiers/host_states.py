"""States of recurrent layers on the host, behind blocks that lie there: kept, found, and brought back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.offload import Move
from kvreclaim.memory.prefix.index import STATE, Entry
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.memory.tiers.tier import Tier


class NoHostStates:
    """No states go to the host. HostStates overrides all of this."""

    version = 0
    """Grows whenever an answer of `best` may have changed."""

    def best(self, match: PrefixMatch, whole: PrefixMatch, run: Sequence[Entry]) -> PrefixMatch:
        """The match with what the host has behind it. whole: what the pool has, with states or without; run:
        the host's entries of the prompt's first blocks. Changes nothing."""
        return replace(match, lower=tuple(run[len(match.entries) :]))

    def begin(self, seq_id: int, match: PrefixMatch) -> None:
        """A sequence begins with a match: its state may have to be loaded."""

    def met(self, table: BlockTable, below: Sequence[Entry]) -> None:
        """A sequence follows these entries of the host."""

    def offer(self, seq_id: int, table: BlockTable, below: Sequence[Entry], first: int) -> None:
        """A sequence has committed; from `first` on, it follows these entries since then."""

    def free(self, seq_id: int) -> None:
        """A sequence is gone."""


@dataclass(slots=True)
class HostStateCounts:
    """Since the start: states brought to the host and from there, and copies that failed."""

    stored: int = 0
    loaded: int = 0
    failed: int = 0


class HostStates(NoHostStates):
    """Which state slots of the host hold the states behind which of its blocks, and which are to be copied.

    A checkpoint of the device goes to the host as soon as its block lies there; the one in an answer, which
    the next one replaces, when the sequence ends. A state whose block is gone can't be found and gives way
    first, then the least recently used one.

    Args:
        group:     the states on the device
        host:      slots of blocks
        num_slots: of states, >= 1
    """

    def __init__(self, group: RecurrentGroup, host: Tier, num_slots: int) -> None:
        self.num_slots = num_slots
        self.counts = HostStateCounts()
        self._group, self._index = group, host.pool.index
        self._free = list(range(num_slots))[::-1]
        self._kept: dict[int, tuple[Entry, int]] = {}
        """By the host entry's serial; the least recently used first."""
        self._wanted: dict[int, tuple[Entry, Entry]] = {}
        """The pool's entry with the state that this entry of the host lacks."""
        self._last: dict[int, tuple[Entry, Entry]] = {}
        """The same of each sequence, behind the newest block of its answer."""
        self._coming: dict[int, Entry] = {}

    @property
    def num_kept(self) -> int:
        """States that can be found."""
        return sum(self._index.is_live(entry) for entry, _ in self._kept.values())

    def best(self, match: PrefixMatch, whole: PrefixMatch, run: Sequence[Entry]) -> PrefixMatch:
        """The same: it ends at the deepest block behind which the device or the host has the state."""
        known, num_here = max(len(whole.entries), len(run)), len(match.entries)
        depths = range(len(run), num_here, -1)
        depth = next((n for n in depths if run[n - 1].serial in self._kept), None)
        miss = STATE if known > (depth or num_here) else whole.miss
        if depth is None:
            return replace(match, miss=miss, num_indexed=known)
        entries = whole.entries[:depth]
        lower = tuple(run[len(entries) : depth])
        return PrefixMatch(match.keys, entries, miss, lower, num_indexed=known, state=run[depth - 1])

    # Who has what.

    def begin(self, seq_id: int, match: PrefixMatch) -> None:
        if match.state is not None:
            self._use(match.state)
            self._coming[seq_id] = match.state

    def met(self, table: BlockTable, below: Sequence[Entry]) -> None:
        if below and len(below) == len(table.entries):
            self._want(table.entries[-1], below[-1])

    def offer(self, seq_id: int, table: BlockTable, below: Sequence[Entry], first: int) -> None:
        for pair in zip(table.entries[first:], below[first:], strict=False):
            self._want(*pair)
        num_known, size = len(below), self._group.block_size
        if not num_known or table.logical_len != num_known * size:
            return
        pair = table.entries[num_known - 1], below[-1]
        if self._group.is_rolling(seq_id, pair[0]):
            self._wanted.pop(pair[1].serial, None)
            self._last[seq_id] = pair
        else:
            self._want(*pair)

    def _want(self, above: Entry, entry: Entry) -> None:
        """Have the state of this entry of the pool, if it is kept, copied to its twin on the host."""
        if entry.serial in self._kept:
            self._use(entry)
        elif self._group.checkpoint(above) is not None:
            self._wanted[entry.serial] = above, entry

    def _use(self, entry: Entry) -> None:
        self._kept[entry.serial] = self._kept.pop(entry.serial)  # behind the others

    def free(self, seq_id: int) -> None:
        self._coming.pop(seq_id, None)
        if (pair := self._last.pop(seq_id, None)) is not None:
            self._want(*pair)

    # Moves.

    def pop_stores(self) -> list[Move]:
        """(slot of the device, slot of the host) of states that are there still; they can be found from now
        on. To be called while no step is on its way."""
        found, wanted, self._wanted = [], self._wanted, {}
        for above, entry in wanted.values():
            slot = self._group.checkpoint(above)
            if slot is not None and self._index.is_live(entry) and entry.serial not in self._kept:
                found.append((slot, self._take()))
                self._kept[entry.serial] = entry, found[-1][1]
        self.counts.stored += len(found)
        self.version += bool(found)
        return found

    def _take(self) -> int:
        if not self._free:
            gone = (serial for serial, (entry, _) in self._kept.items() if not self._index.is_live(entry))
            self._drop(next(gone, next(iter(self._kept))))
        return self._free.pop()

    def _drop(self, serial: int) -> None:
        self._free.append(self._kept.pop(serial)[1])
        self.version += 1

    def unstored(self, slots: Sequence[int]) -> None:
        """These slots could not be written."""
        for serial in [serial for serial, (_, slot) in self._kept.items() if slot in slots]:
            self._drop(serial)
        self.counts.stored -= len(slots)
        self.counts.failed += len(slots)

    def is_coming(self, seq_id: int) -> bool:
        """Whether a sequence begins with a state that is to be loaded."""
        return seq_id in self._coming

    def source(self, seq_id: int) -> int | None:
        """The slot that holds this state; None: it could not be read for another one."""
        kept = self._kept.get(self._coming[seq_id].serial)
        return None if kept is None else kept[1]

    def slot(self, entry: Entry) -> int:
        """Where the state behind this block lies, which a match has named."""
        return self._kept[entry.serial][1]

    def loaded(self, seq_id: int, table: BlockTable) -> None:
        """It lies in the sequence's slot, and can be found on the device from now on."""
        del self._coming[seq_id]
        self.counts.loaded += 1
        self._group.keep_begun(seq_id, table)

    def unloaded(self, seq_id: int) -> None:
        """It could not be read: nobody finds it any more."""
        if (entry := self._coming.pop(seq_id)).serial in self._kept:
            self._drop(entry.serial)
        self.counts.failed += 1

    def reset(self) -> None:
        """Forget all of them."""
        for serial in list(self._kept):
            self._drop(serial)

    def check(self) -> None:
        """Raises AssertionError unless each slot is free or kept once."""
        slots = sorted([*self._free, *(slot for _, slot in self._kept.values())])
        assert slots == list(range(self.num_slots)), f"state slots of the host: {slots}"
