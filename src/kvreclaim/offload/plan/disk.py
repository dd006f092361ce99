"""The disk below the host: which slot of the file holds which block, and the transfers under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvreclaim.memory.prefix.index import BlockKey, BlockKeys, BlockName, Entry, Link
from kvreclaim.offload.plan.tier import Tier
from kvreclaim.offload.plan.transfers import Transfer, TransferOutcome, Transfers


@dataclass(slots=True, eq=False)
class _Store:
    """A copy of one block of a chain to disk.

    parent:   the entry of the chain's block before it; its copy while that is under way; or the chain's root
    outcome:  None while it is under way
    entry:    in the index, once the copy and those before it are over
    children: copies that wait for this one
    """

    transfer: Transfer
    parent: Link | _Store
    outcome: TransferOutcome | None = None
    entry: Entry | None = None
    children: list[_Store] = field(default_factory=list)
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class Loading:
    """Blocks first, first + 1, ... of a waiting sequence's keys, on their way to the host.

    held:     host slots of the blocks before, which must stay meanwhile
    linked:   host entries of the leading ones that have arrived
    after:    of another sequence that loads the next block, which this one waits for
    ended:    its sequence has begun, or is gone
    is_broken: a block is missing, and none behind it can be of use
    """

    keys: BlockKeys
    max_tokens: int
    first: int
    held: list[int]
    deadline: float
    transfers: list[Transfer] = field(default_factory=list)
    outcomes: list[TransferOutcome | None] = field(default_factory=list)
    linked: list[Entry] = field(default_factory=list)
    after: Loading | None = None
    ended: bool = False
    is_broken: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether more of it may arrive and be of use."""
        if self.is_broken:
            return False
        rest = self.outcomes[len(self.linked) :]
        if rest and rest[0] is None:
            return True
        return not rest and self.after is not None and self.after.is_pending


class DiskTier(Transfers[_Store, "tuple[Loading, int]"]):
    """Slots of a file below the host's.

    A block enters an index when its bytes have arrived and its parent is in that index. A failed transfer
    leaves no entry, and a damaged record is forgotten.

    Args:
        host:      the tier above
        num_slots, eviction_policy: of the file's slots
    """

    def __init__(self, host: Tier, num_slots: int, eviction_policy: str) -> None:
        super().__init__()
        self.host = host
        self.tier = Tier(num_slots, eviction_policy, hides_salts=True)
        self.num_unstored = 0
        self._storing: dict[bytes, _Store] = {}
        self._loading: dict[bytes, Loading] = {}

    def recover(self, found: Iterable[tuple[int, BlockName]]) -> int:
        """Enter the file's blocks, parents before their children. Returns: how many can be found."""
        pool, by_uid = self.tier.pool, dict[bytes, Entry]()
        held = pool.allocate(pool.num_blocks)
        for slot, name in found:
            parent: Link | None = by_uid.get(name.parent_uid)
            if not name.depth:
                parent = pool.index.root(name.parent_uid.hex())
            if parent is not None and pool.index.at(name.key) is None:
                entry = pool.enter(slot, parent, BlockKey(name.key, name.tokens))
                if entry is not None:
                    by_uid[name.uid] = entry
        cached = [entry.block for entry in by_uid.values()]
        is_cached = set(cached)
        pool.release(slot for slot in held if slot not in is_cached)
        pool.release(reversed(cached))
        return len(cached)

    def reset(self) -> None:
        self.tier.pool.clear_index()
        for loading in {id(each): each for each, _ in self._loads.values()}.values():
            if not loading.is_broken:
                self._break(loading, len(loading.linked))
        super().reset()

    # Host to disk.

    def store(self, keys: BlockKeys, i: int, parent: Link | _Store, host_entry: Entry) -> _Store | None:
        """Write block i of these keys, which a host slot holds, behind its parent.

        Returns: the store, maybe an older one of the same block; None if no slot is free.
        """
        name = keys.name(i)
        if (known := self._storing.get(name.uid)) is not None:
            return known
        if not self.tier.pool.num_free:
            self.num_unstored += 1
            return None
        (slot,) = self.tier.pool.allocate(1)
        self.host.pool.touch(host_entry.block)
        store = _Store(self._begin(True, host_entry.block, slot, name), parent)
        self._stores[store.transfer.job_id] = self._storing[name.uid] = store
        return store

    def forget(self, keys: BlockKeys, num_blocks: int) -> None:
        """Cancel stores of these blocks."""
        for i in range(num_blocks):
            store = self._storing.get(keys.name(i).uid)
            if store is not None:
                store.is_cancelled = True

    def _finish_store(self, store: _Store, outcome: TransferOutcome) -> None:
        store.outcome = outcome
        self.host.pool.release([store.transfer.host_slot])
        parent = store.parent
        if isinstance(parent, _Store) and parent.outcome is None:
            parent.children.append(store)
        else:
            self._link_store(store)

    def _link_store(self, store: _Store) -> None:
        """Enter a finished store behind its parent, then its children that wait."""
        pool, transfer = self.tier.pool, store.transfer
        parent = store.parent.entry if isinstance(store.parent, _Store) else store.parent
        if (
            store.outcome is TransferOutcome.OK
            and not store.is_cancelled
            and parent is not None
            and pool.index.is_live(parent)
        ):
            entry = pool.enter(transfer.disk_slot, parent, BlockKey(transfer.name.key, transfer.name.tokens))
            store.entry = entry
            self.num_stored += entry is not None
        self.num_failed += store.outcome is not TransferOutcome.OK
        del self._storing[transfer.name.uid]
        children, store.children = store.children, []
        for child in children:
            self._link_store(child)
        pool.release([transfer.disk_slot])

    # Disk to host.

    def load(self, keys: BlockKeys, max_tokens: int, deadline: float) -> Loading | None:
        """Begin to load full blocks of the first max_tokens that the host lacks; None: there are none."""
        limit = max_tokens // keys.block_size
        above, below = self.host.run(keys, limit), self.tier.run(keys, limit)
        if len(below) <= len(above):
            return None
        first = len(above)
        loading = Loading(keys, max_tokens, first, [entry.block for entry in above], deadline)
        for slot in loading.held:
            self.host.pool.touch(slot)
        for i in range(first, len(below)):
            name = keys.name(i)
            if (other := self._loading.get(name.uid)) is not None:
                loading.after = other
                break
            if not self.host.pool.num_free:
                break
            (slot,) = self.host.pool.allocate(1)
            self.tier.pool.hit([below[i].block], 0)
            transfer = self._begin(False, slot, below[i].block, name)
            self._loads[transfer.job_id] = loading, len(loading.transfers)
            self._loading[name.uid] = loading
            loading.transfers.append(transfer)
            loading.outcomes.append(None)
        if loading.transfers or loading.after is not None:
            return loading
        self.end(loading)
        return None

    def end(self, loading: Loading) -> None:
        """End a load when its sequence has begun or ended. Blocks that arrive later stay cached."""
        loading.ended = True
        self.host.pool.release(reversed([*loading.held, *(entry.block for entry in loading.linked)]))
        loading.held.clear()

    def _finish_load(self, load: tuple[Loading, int], outcome: TransferOutcome) -> None:
        loading, place = load
        transfer = loading.transfers[place]
        loading.outcomes[place] = outcome
        if outcome is TransferOutcome.GONE:
            self.num_gone += 1
            self.tier.pool.unindex(transfer.disk_slot)
        self.num_failed += outcome is TransferOutcome.FAILED
        self.tier.pool.release([transfer.disk_slot])
        if loading.is_broken:
            self._drop_load(transfer)
        else:
            self._link_loaded(loading)

    def _drop_load(self, transfer: Transfer) -> None:
        """Drop a finished transfer and its host slot."""
        del self._loading[transfer.name.uid]
        self.host.pool.release([transfer.host_slot])

    def _link_loaded(self, loading: Loading) -> None:
        """Enter arrived blocks behind the host's, as far as they follow without a gap."""
        pool = self.host.pool
        while (place := len(loading.linked)) < len(loading.outcomes):
            outcome, transfer = loading.outcomes[place], loading.transfers[place]
            if outcome is None:
                return
            entry, parent = None, self._parent_above(loading)
            if outcome is TransferOutcome.OK and parent is not None:
                entry = pool.enter(transfer.host_slot, parent, loading.keys[loading.first + place])
            if entry is None:
                self._break(loading, place)
                return
            pool.touch(entry.block)  # another slot's if the block has been computed meanwhile
            self._drop_load(transfer)
            self.num_loaded += 1
            loading.linked.append(entry)
            if loading.ended:
                pool.release([entry.block])

    def _break(self, loading: Loading, place: int) -> None:
        """Drop a load from this place on, which is of no use."""
        loading.is_broken = True
        for rest, end in zip(loading.transfers[place:], loading.outcomes[place:], strict=True):
            if end is not None:
                self._drop_load(rest)

    def _parent_above(self, loading: Loading) -> Link | None:
        """The host's entry that the next block of a loading follows; None if it has gone."""
        if loading.linked:
            last = loading.linked[-1]
            return last if self.host.pool.index.is_live(last) else None
        above = self.host.run(loading.keys, loading.first)
        if len(above) < loading.first:
            return None
        return above[-1] if above else self.host.root(loading.keys.salt)

    def references(self) -> tuple[Counter[int], Counter[int]]:
        """References to slots of the host and of the file, of transfers and waiting stores; for checks."""
        host, disk = Counter[int](), Counter[int]()
        for store in self._storing.values():
            disk[store.transfer.disk_slot] += 1
            host[store.transfer.host_slot] += store.outcome is None
        for loading in {id(each): each for each, _ in self._loads.values()}.values():
            first = len(loading.linked)
            for transfer, end in zip(loading.transfers[first:], loading.outcomes[first:], strict=True):
                host[transfer.host_slot] += end is None or not loading.is_broken
                disk[transfer.disk_slot] += end is None
        return +host, +disk
