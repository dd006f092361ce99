"""States of recurrent layers in a file below the host: which are there, and which are on their way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.prefix.index import Entry
from kvreclaim.memory.prefix.keys import BlockKeys, BlockName
from kvreclaim.memory.tiers.disk import DiskTier
from kvreclaim.memory.tiers.disk_prefixes import NoDiskStates
from kvreclaim.memory.tiers.host_states import HostStates, NoStatesBelow
from kvreclaim.memory.tiers.pinned_slots import PinnedSlots
from kvreclaim.memory.tiers.transfers import Transfer, TransferOutcome, Transfers


@dataclass(slots=True, eq=False)
class _Load:
    """The state behind the first `depth` blocks of these keys, on its way to the host.

    has_arrived: it lies in its slot of the host, and is found once these blocks lie there, too
    """

    transfer: Transfer
    keys: BlockKeys
    depth: int
    has_arrived: bool = False


class DiskStates(Transfers[Transfer, _Load], NoStatesBelow, NoDiskStates):
    """Slots of a file for states, by the blocks behind which they stand. A state outlives its block in the
    file above; it is found again when the block comes back. The least recently used one gives way.

    Args:
        group, host: the states on the device, and those above
        disk:        the blocks on disk
        num_slots:   >= 1
        store_after: times that a state must have been met before it is written, 1 for at once
    """

    def __init__(
        self, group: RecurrentGroup, host: HostStates, disk: DiskTier, num_slots: int, store_after: int
    ) -> None:
        super().__init__()
        self.slots = PinnedSlots(num_slots)
        self._group, self._host, self._disk, self._at_once = group, host, disk, store_after <= 1
        self._kept: dict[bytes, int] = {}
        """By the uid of the block; the least recently used first."""
        self._loading: dict[bytes, _Load] = {}
        self._waiting: dict[int, tuple[_Load, float]] = {}
        """What a waiting sequence waits for, and until when."""
        self._unwanted: set[int] = set()
        """Transfers under way whose end nobody is to find."""

    @property
    def num_kept(self) -> int:
        """States that can be read."""
        return len(self._kept)

    def recover(self, found: Iterable[tuple[int, BlockName]]) -> int:
        """The same; the oldest comes first."""
        places = {name.uid: slot for slot, name in found}
        taken = [slot for _ in range(self.slots.num_slots) if (slot := self.slots.take()) is not None]
        self._kept.update(places)
        held = set(places.values())
        for slot in reversed(taken):
            if slot not in held:
                self.slots.give_back(slot)
        return len(places)

    # Host to disk.

    def name(self, keys: BlockKeys, index: int) -> BlockName | None:
        return keys.name(index) if keys.lasting else None

    def stored(self, name: BlockName | None, slot: int) -> None:
        if self._at_once:
            self.met(name, slot)

    def met(self, name: BlockName | None, slot: int) -> None:
        if name is None or any(each.name.uid == name.uid for each in self._stores.values()):
            return
        if name.uid in self._kept:
            self._kept[name.uid] = self._kept.pop(name.uid)  # behind the others
            return
        if (target := self._take()) is None:
            return
        self._host.slots.pin(slot)
        transfer = self._begin(True, slot, target, name)
        self._stores[transfer.job_id] = transfer

    def unstored(self, slots: Sequence[int]) -> None:
        for transfer in [each for each in self._out if each.to_disk and each.host_slot in slots]:
            self._out.remove(transfer)
            self.finish(transfer.job_id, TransferOutcome.FAILED)

    def _take(self) -> int | None:
        """A slot, for which a state that nobody is reading may give way."""
        if not self.slots.num_free:
            idle = (uid for uid, slot in self._kept.items() if not self.slots.is_pinned(slot))
            if (uid := next(idle, None)) is not None:
                self.slots.give_back(self._kept.pop(uid))
        return self.slots.take()

    def _finish_store(self, store: Transfer, outcome: TransferOutcome) -> None:
        self._host.slots.unpin(store.host_slot)
        is_wanted = self._is_wanted(store)
        if outcome is TransferOutcome.OK and is_wanted:
            self._kept[store.name.uid] = store.disk_slot
            self.num_stored += 1
        else:
            self.slots.give_back(store.disk_slot)
            self.num_failed += outcome is not TransferOutcome.OK

    def _is_wanted(self, transfer: Transfer) -> bool:
        """To be asked once, at its end."""
        if transfer.job_id in self._unwanted:
            self._unwanted.remove(transfer.job_id)
            return False
        return True

    def forget(self, keys: BlockKeys) -> None:
        uids = {keys.name(i).uid for i in range(keys.num_tokens // keys.block_size)}
        for uid in uids & self._kept.keys():
            self.slots.give_back(self._kept.pop(uid))
        under_way = [*self._stores.values(), *(load.transfer for load in self._loads.values())]
        self._unwanted.update(each.job_id for each in under_way if each.name.uid in uids)
        for load in [each for uid, each in self._loading.items() if uid in uids and each.has_arrived]:
            self._drop(load)

    # Disk to host.

    def goal(
        self,
        keys: BlockKeys,
        limit: int,
        here: Sequence[Entry],
        above: Sequence[Entry],
        below: Sequence[Entry],
    ) -> int:
        for n in range(min(limit, max(len(here), len(above), len(below))), 0, -1):
            on_device = n <= len(here) and self._group.checkpoint(here[n - 1]) is not None
            if on_device or (n <= len(above) and self._host.has(above[n - 1])):
                return 0
            if n <= max(len(above), len(below)) and keys.name(n - 1).uid in self._kept:
                return n
        return 0

    def load(self, seq_id: int, keys: BlockKeys, depth: int, deadline: float) -> None:
        name = keys.name(depth - 1)
        found = self._loading.get(name.uid)
        if found is None:
            slot = self._host.take()
            if slot is None:
                return
            source = self._kept[name.uid] = self._kept.pop(name.uid)  # behind the others
            self.slots.pin(source)
            found = _Load(self._begin(False, slot, source, name), keys, depth)
            self._loads[found.transfer.job_id] = self._loading[name.uid] = found
        self._waiting[seq_id] = found, deadline

    def must_wait(self, seq_id: int, now: float) -> bool:
        load, deadline = self._waiting.get(seq_id, (None, now))
        return load is not None and load.transfer.job_id in self._loads and now < deadline

    def end(self, seq_id: int) -> None:
        self._waiting.pop(seq_id, None)

    def _finish_load(self, load: _Load, outcome: TransferOutcome) -> None:
        transfer = load.transfer
        self.slots.unpin(transfer.disk_slot)
        is_wanted = self._is_wanted(transfer)
        if outcome is TransferOutcome.OK and is_wanted:
            load.has_arrived = True
            self.link()
            return
        self._drop(load)
        self.num_failed += outcome is TransferOutcome.FAILED
        if outcome is TransferOutcome.GONE:
            self.num_gone += 1
            if self._kept.get(transfer.name.uid) == transfer.disk_slot:
                self.slots.give_back(self._kept.pop(transfer.name.uid))

    def link(self) -> None:
        """Let states that have arrived be found behind blocks that have; those whose blocks do not come are
        dropped."""
        for load in [each for each in self._loading.values() if each.has_arrived]:
            run = self._disk.host.run(load.keys, load.depth)
            if len(run) == load.depth:
                del self._loading[load.transfer.name.uid]
                self._host.enter(run[-1], load.transfer.host_slot)
                self.num_loaded += 1
            elif not self._disk.num_loading:
                self._drop(load)

    def _drop(self, load: _Load) -> None:
        del self._loading[load.transfer.name.uid]
        self._host.slots.give_back(load.transfer.host_slot)

    def reset(self) -> None:
        while self._kept:
            self.slots.give_back(self._kept.popitem()[1])
        self._unwanted.update([*self._stores, *self._loads])
        for load in [each for each in self._loading.values() if each.has_arrived]:
            self._drop(load)
        super().reset()

    @property
    def lent(self) -> list[int]:
        """Slots of the host that loads have."""
        return [load.transfer.host_slot for load in self._loading.values()]

    def check(self) -> None:
        """Raises AssertionError unless each slot of the file is kept once, being written, or free."""
        self.slots.check([*self._kept.values(), *(each.disk_slot for each in self._stores.values())])
