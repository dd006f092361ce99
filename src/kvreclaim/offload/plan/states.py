"""Offload of recurrent layers' states: to the host, after their prefix's blocks, and to a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.groups.state_slots import StateSlots
from kvreclaim.memory.offload import Move
from kvreclaim.memory.prefix.index import STATE, BlockKeys, BlockName, Entry
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.offload.plan.disk import DiskTier
from kvreclaim.offload.plan.tier import Tier
from kvreclaim.offload.plan.transfers import Transfer, TransferOutcome, Transfers


@dataclass(slots=True)
class _DueCopy:
    """A state to be copied to the host: behind `above`, a block of the pool, and `entry`, the same block on
    the host. name: of the state in the file; None: it is not written there"""

    above: Entry
    entry: Entry
    name: BlockName | None


@dataclass(slots=True)
class HostStateCounts:
    """Since the start: states copied to the host and from there, and copies that failed."""

    stored: int = 0
    loaded: int = 0
    failed: int = 0


class HostStates:
    """Which state slots of the host hold the states behind which of its blocks, and which are to be copied.

    A checkpoint of the device is copied to the host as soon as its block lies there. The one in an answer,
    which the next one replaces, is copied when the sequence ends.

    Args:
        group:     the states on the device
        host:      slots of blocks
        num_slots: of states, >= 1
    """

    def __init__(self, group: RecurrentGroup, host: Tier, num_slots: int) -> None:
        self.slots = StateSlots[Entry](num_slots, is_live=host.pool.index.is_live)
        self.counts = HostStateCounts()
        self.below: DiskStates | None = None
        """States that come to the host are offered to this file."""
        self._group, self._index = group, host.pool.index
        self._due: dict[Entry, _DueCopy] = {}
        """By the host's block."""
        self._last: dict[int, _DueCopy] = {}
        """By sequence: behind the newest block of its answer."""
        self._coming: dict[int, Entry] = {}

    def best(self, match: PrefixMatch, whole: PrefixMatch, run: Sequence[Entry]) -> PrefixMatch:
        """The match up to the deepest block behind which the device or the host has the state. whole: blocks
        that the pool has, with states or without; run: the host's entries of the prompt's first blocks.
        Changes nothing."""
        known, num_here = max(len(whole.entries), len(run)), len(match.entries)
        depth = next((n for n in range(len(run), num_here, -1) if run[n - 1] in self.slots), None)
        miss = STATE if known > (depth or num_here) else whole.miss
        if depth is None:
            return replace(match, miss=miss, num_indexed=known)
        entries = whole.entries[:depth]
        lower = tuple(run[len(entries) : depth])
        return PrefixMatch(match.keys, entries, miss, lower, num_indexed=known, state=run[depth - 1])

    # Sequences.

    def begin(self, seq_id: int, match: PrefixMatch) -> None:
        """A sequence begins with a match. Its state may have to be loaded."""
        if match.state is not None:
            self.slots.use(match.state)
            self._coming[seq_id] = match.state

    def met(self, table: BlockTable, below: Sequence[Entry]) -> None:
        """A sequence follows these entries of the host."""
        if below and len(below) == len(table.entries):
            self._copy(self._due_copy(table, below, len(below) - 1))

    def offer(self, seq_id: int, table: BlockTable, below: Sequence[Entry], first: int) -> None:
        """A sequence has committed, and follows these entries, the ones from `first` on since then."""
        for i in range(first, min(len(table.entries), len(below))):
            self._copy(self._due_copy(table, below, i))
        num_known, size = len(below), self._group.block_size
        if not num_known or table.logical_len != num_known * size:
            return
        due = self._due_copy(table, below, num_known - 1)
        if self._group.is_rolling(seq_id, due.above):
            self._due.pop(due.entry, None)
            self._last[seq_id] = due
        else:
            self._copy(due)

    def _due_copy(self, table: BlockTable, below: Sequence[Entry], i: int) -> _DueCopy:
        name = None if self.below is None or not table.keys.lasting else table.keys.name(i)
        return _DueCopy(table.entries[i], below[i], name)

    def _copy(self, due: _DueCopy) -> None:
        """Have this state, if the device keeps it, copied to the host."""
        if due.entry in self.slots:
            slot = self.slots.use(due.entry)
            if self.below is not None:
                self.below.met(due.name, slot)
        elif self._group.checkpoint(due.above) is not None:
            self._due[due.entry] = due

    def free(self, seq_id: int) -> None:
        """A sequence has ended."""
        self._coming.pop(seq_id, None)
        if (due := self._last.pop(seq_id, None)) is not None:
            self._copy(due)

    # Moves.

    def pop_stores(self) -> list[Move]:
        """(slot of the device, slot of the host) of states that the device still has; they can be found from
        now on. To be called while no step is on its way."""
        found, due, self._due = list[Move](), self._due, {}
        for entry, one in due.items():
            source = self._group.checkpoint(one.above)
            if source is None or not self._index.is_live(entry) or entry in self.slots:
                continue
            if (target := self.slots.take()) is not None:
                found.append((source, target))
                self.slots.keep(entry, target)
                if self.below is not None:
                    self.below.stored(one.name, target)
        self.counts.stored += len(found)
        return found

    def unstored(self, slots: Sequence[int]) -> None:
        """Forget slots that could not be written."""
        if self.below is not None:
            self.below.unstored(slots)
        self.slots.drop_slots(slots)
        self.counts.stored -= len(slots)
        self.counts.failed += len(slots)

    def is_coming(self, seq_id: int) -> bool:
        """Whether a sequence begins with a state that is to be loaded."""
        return seq_id in self._coming

    def source(self, seq_id: int) -> int | None:
        """The slot that holds this state; None: loading it for another sequence has failed."""
        return self.slots.find(self._coming[seq_id])

    def loaded(self, seq_id: int, table: BlockTable) -> None:
        """It lies in the sequence's slot, and can be found on the device from now on."""
        del self._coming[seq_id]
        self.counts.loaded += 1
        self._group.keep_begun(seq_id, table)

    def unloaded(self, seq_id: int) -> None:
        """Forget a state that could not be read."""
        self.slots.drop(self._coming.pop(seq_id))
        self.counts.failed += 1

    def check(self, held: Sequence[int]) -> None:
        """Raises AssertionError unless each slot is kept, referenced or free. held: references of parked
        sequences"""
        self.slots.check([*held, *([] if self.below is None else self.below.host_slots)])


@dataclass(slots=True, eq=False)
class _StateLoad:
    """The state behind the first `depth` blocks of these keys, on its way to the host.

    has_arrived: it lies in its slot of the host, and is found once these blocks also lie there
    """

    transfer: Transfer
    keys: BlockKeys
    depth: int
    has_arrived: bool = False


class DiskStates(Transfers[Transfer, _StateLoad]):
    """Slots of a file for states, by the uid of the block behind which they stand. A state outlives its block
    in the file of blocks; it is found again when the block comes back.

    Args:
        group, host: the states on the device, and those on the host
        disk:        the blocks on disk
        num_slots:   >= 1
        store_after: times that a state must have been met before it is written, 1 for at once
    """

    def __init__(
        self, group: RecurrentGroup, host: HostStates, disk: DiskTier, num_slots: int, store_after: int
    ) -> None:
        super().__init__()
        self.slots = StateSlots[bytes](num_slots)
        self._group, self._host, self._disk, self._at_once = group, host, disk, store_after <= 1
        self._loading: dict[bytes, _StateLoad] = {}
        self._waiting: dict[int, tuple[_StateLoad, float]] = {}
        """By waiting sequence: what it waits for, and until when."""
        self._cancelled: set[int] = set()
        """Transfers under way with results to be dropped."""

    def recover(self, found: Iterable[tuple[int, BlockName]]) -> int:
        """Enter the file's states, the oldest first. Returns: how many can be found."""
        self.slots.reset({name.uid: slot for slot, name in found})
        return len(self.slots)

    # Host to disk.

    def stored(self, name: BlockName | None, slot: int) -> None:
        """A slot of the host is filled with this state before anything is moved to disk."""
        if self._at_once:
            self.met(name, slot)

    def met(self, name: BlockName | None, slot: int) -> None:
        """A sequence has met this state, which a slot of the host holds."""
        if name is None or any(each.name.uid == name.uid for each in self._stores.values()):
            return
        if name.uid in self.slots:
            self.slots.use(name.uid)
        elif (target := self.slots.take()) is not None:
            transfer = self._begin(True, self._host.slots.share(slot), target, name)
            self._stores[transfer.job_id] = transfer

    def unstored(self, slots: Sequence[int]) -> None:
        """These slots of the host could not be filled."""
        for transfer in [each for each in self._out if each.to_disk and each.host_slot in slots]:
            self._out.remove(transfer)
            self.finish(transfer.job_id, TransferOutcome.FAILED)

    def _finish_store(self, store: Transfer, outcome: TransferOutcome) -> None:
        self._host.slots.release(store.host_slot)
        is_cancelled = self._pop_cancelled(store)
        if outcome is TransferOutcome.OK and not is_cancelled:
            self.slots.keep(store.name.uid, store.disk_slot)
            self.num_stored += 1
        else:
            self.slots.release(store.disk_slot)
            self.num_failed += outcome is not TransferOutcome.OK

    def _pop_cancelled(self, transfer: Transfer) -> bool:
        """Clear the transfer's cancel mark; call once, when it finishes. Returns: whether it had one."""
        is_cancelled = transfer.job_id in self._cancelled
        self._cancelled.discard(transfer.job_id)
        return is_cancelled

    def forget(self, keys: BlockKeys) -> None:
        """Nothing finds the states behind these blocks any more."""
        uids = {keys.name(i).uid for i in range(keys.num_tokens // keys.block_size)}
        for uid in uids:
            self.slots.drop(uid)
        under_way = [*self._stores.values(), *(load.transfer for load in self._loads.values())]
        self._cancelled.update(each.job_id for each in under_way if each.name.uid in uids)
        for load in [each for uid, each in self._loading.items() if uid in uids and each.has_arrived]:
            self._drop(load)

    # Disk to host.

    def num_useful(
        self,
        keys: BlockKeys,
        limit: int,
        here: Sequence[Entry],
        above: Sequence[Entry],
        below: Sequence[Entry],
    ) -> int:
        """Leading blocks, up to `limit`, that the host should have to begin at a state on disk; 0: none on
        disk is of use. here, above, below: the entries that the pool, the host and the disk have"""
        for n in range(min(limit, max(len(here), len(above), len(below))), 0, -1):
            on_device = n <= len(here) and self._group.checkpoint(here[n - 1]) is not None
            if on_device or (n <= len(above) and above[n - 1] in self._host.slots):
                return 0
            if n <= max(len(above), len(below)) and keys.name(n - 1).uid in self.slots:
                return n
        return 0

    def load(self, seq_id: int, keys: BlockKeys, depth: int, deadline: float) -> None:
        """Begin to load the state behind the first `depth` blocks for a waiting sequence."""
        name = keys.name(depth - 1)
        found = self._loading.get(name.uid)
        if found is None:
            if (slot := self._host.slots.take()) is None:
                return
            source = self.slots.share(self.slots.use(name.uid))
            found = _StateLoad(self._begin(False, slot, source, name), keys, depth)
            self._loads[found.transfer.job_id] = self._loading[name.uid] = found
        self._waiting[seq_id] = found, deadline

    def must_wait(self, seq_id: int, now: float) -> bool:
        """Whether the sequence goes on waiting for a state."""
        load, deadline = self._waiting.get(seq_id, (None, now))
        return load is not None and load.transfer.job_id in self._loads and now < deadline

    def end(self, seq_id: int) -> None:
        """The sequence no longer waits."""
        self._waiting.pop(seq_id, None)

    def _finish_load(self, load: _StateLoad, outcome: TransferOutcome) -> None:
        transfer = load.transfer
        is_cancelled = self._pop_cancelled(transfer)
        self.slots.release(transfer.disk_slot)
        if outcome is TransferOutcome.OK and not is_cancelled:
            load.has_arrived = True
            self.link()
            return
        self._drop(load)
        self.num_failed += outcome is TransferOutcome.FAILED
        if outcome is TransferOutcome.GONE:
            self.num_gone += 1
            if self.slots.find(transfer.name.uid) == transfer.disk_slot:
                self.slots.drop(transfer.name.uid)

    def link(self) -> None:
        """Enter arrived states behind arrived blocks. States of blocks that do not come are dropped."""
        for load in [each for each in self._loading.values() if each.has_arrived]:
            run = self._disk.host.run(load.keys, load.depth)
            if len(run) == load.depth:
                del self._loading[load.transfer.name.uid]
                self._host.slots.keep(run[-1], load.transfer.host_slot)
                self.num_loaded += 1
            elif not self._disk.num_loading:
                self._drop(load)

    def _drop(self, load: _StateLoad) -> None:
        del self._loading[load.transfer.name.uid]
        self._host.slots.release(load.transfer.host_slot)

    def reset(self) -> None:
        self.slots.reset()
        self._cancelled.update([*self._stores, *self._loads])
        for load in [each for each in self._loading.values() if each.has_arrived]:
            self._drop(load)
        super().reset()

    @property
    def host_slots(self) -> list[int]:
        """References to slots of the host, of loads and stores."""
        under_way = [*(load.transfer for load in self._loading.values()), *self._stores.values()]
        return [transfer.host_slot for transfer in under_way]

    def check(self) -> None:
        """Raises AssertionError unless each slot of the file is kept, referenced or free."""
        under_way = [*self._stores.values(), *(load.transfer for load in self._loads.values())]
        self.slots.check([transfer.disk_slot for transfer in under_way])
