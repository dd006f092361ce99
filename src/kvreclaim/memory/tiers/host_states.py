"""States of recurrent layers on the host, behind blocks that lie there: kept, found, and brought back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.offload import Move
from kvreclaim.memory.prefix.index import STATE, Entry
from kvreclaim.memory.prefix.keys import BlockKeys, BlockName
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.memory.tiers.pinned_slots import PinnedSlots
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


class NoStatesBelow:
    """No states go from the host to disk. DiskStates overrides all of this."""

    def name(self, keys: BlockKeys, index: int) -> BlockName | None:
        """What the state behind this block is called there; None: it does not go there."""
        return None

    def stored(self, name: BlockName | None, slot: int) -> None:
        """A slot of the host is filled with this state before anything is moved to disk."""

    def met(self, name: BlockName | None, slot: int) -> None:
        """A sequence has met what a slot of the host holds."""

    def unstored(self, slots: Sequence[int]) -> None:
        """These slots of the host could not be filled."""


@dataclass(slots=True)
class _Wanted:
    """A state to be copied: behind `above`, an entry of the pool, and `entry`, its twin on the host."""

    above: Entry
    entry: Entry
    name: BlockName | None


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
        self.slots = PinnedSlots(num_slots)
        self._below = NoStatesBelow()
        self.counts = HostStateCounts()
        self._group, self._index = group, host.pool.index
        self._kept: dict[int, tuple[Entry, int]] = {}
        """By the host entry's serial; the least recently used first."""
        self._wanted: dict[int, _Wanted] = {}
        """By the host entry's serial."""
        self._last: dict[int, _Wanted] = {}
        """By sequence: behind the newest block of its answer."""
        self._coming: dict[int, Entry] = {}

    def write_through(self, below: NoStatesBelow) -> None:
        """States that come to the host are offered to a disk, too."""
        self._below = below

    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    def has(self, entry: Entry) -> bool:
        """Whether a slot holds the state behind this block of the host."""
        return entry.serial in self._kept

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
            self._want(self._of(table, below, len(below) - 1))

    def offer(self, seq_id: int, table: BlockTable, below: Sequence[Entry], first: int) -> None:
        for i in range(first, min(len(table.entries), len(below))):
            self._want(self._of(table, below, i))
        num_known, size = len(below), self._group.block_size
        if not num_known or table.logical_len != num_known * size:
            return
        wanted = self._of(table, below, num_known - 1)
        if self._group.is_rolling(seq_id, wanted.above):
            self._wanted.pop(wanted.entry.serial, None)
            self._last[seq_id] = wanted
        else:
            self._want(wanted)

    def _of(self, table: BlockTable, below: Sequence[Entry], i: int) -> _Wanted:
        return _Wanted(table.entries[i], below[i], self._below.name(table.keys, i))

    def _want(self, wanted: _Wanted) -> None:
        """Have this state, if the device keeps it, copied to the host."""
        serial = wanted.entry.serial
        if serial in self._kept:
            self._use(wanted.entry)
            self._below.met(wanted.name, self._kept[serial][1])
        elif self._group.checkpoint(wanted.above) is not None:
            self._wanted[serial] = wanted

    def _use(self, entry: Entry) -> None:
        self._kept[entry.serial] = self._kept.pop(entry.serial)  # behind the others

    def free(self, seq_id: int) -> None:
        self._coming.pop(seq_id, None)
        if (wanted := self._last.pop(seq_id, None)) is not None:
            self._want(wanted)

    # Moves.

    def pop_stores(self) -> list[Move]:
        """(slot of the device, slot of the host) of states that are there still; they can be found from now
        on. To be called while no step is on its way."""
        found, wanted, self._wanted = list[Move](), self._wanted, {}
        for serial, one in wanted.items():
            source = self._group.checkpoint(one.above)
            if source is None or not self._index.is_live(one.entry) or serial in self._kept:
                continue
            if (target := self.take()) is not None:
                found.append((source, target))
                self._kept[serial] = one.entry, target
                self._below.stored(one.name, target)
        self.counts.stored += len(found)
        self.version += bool(found)
        return found

    def take(self) -> int | None:
        """A slot, for which a state that nobody is reading may give way; None: there is none."""
        if not self.slots.num_free:
            idle = [serial for serial, (_, slot) in self._kept.items() if not self.slots.is_pinned(slot)]
            gone = (serial for serial in idle if not self._index.is_live(self._kept[serial][0]))
            if (serial := next(gone, idle[0] if idle else None)) is not None:
                self._drop(serial)
        return self.slots.take()

    def enter(self, entry: Entry, slot: int) -> None:
        """A slot that was taken holds the state behind this block, unless another one does."""
        if entry.serial in self._kept:
            self.slots.give_back(slot)
            return
        self._kept[entry.serial] = entry, slot
        self.version += 1

    def _drop(self, serial: int) -> None:
        self.slots.give_back(self._kept.pop(serial)[1])
        self.version += 1

    def unstored(self, slots: Sequence[int]) -> None:
        """These slots could not be written."""
        self._below.unstored(slots)
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

    def check(self, lent: Sequence[int] = ()) -> None:
        """Raises AssertionError unless each slot is kept once, lent or free. lent: those that others have
        taken"""
        self.slots.check([*lent, *(slot for _, slot in self._kept.values())])
