"""The memory with slots below its pool: exact prefixes are written through to them, and come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import INELIGIBLE, Entry, Link
from kvreclaim.memory.prefix.keys import BlockKeys
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.memory.tiers.counts import TierCounts
from kvreclaim.memory.tiers.disk import DiskTier, Loading
from kvreclaim.memory.tiers.tier import Tier

Move = tuple[int, int]
"""(from, to): a block and a slot, or a slot and a block."""


class WriteThrough(MemoryManager):
    """A memory manager whose exact full blocks also lie in host slots, as long as these have room, and in
    slots of a file below.

    Integers only: the caller carries out the moves, each of which is handed out once. `pop_swap_ins`: slot to
    block, before anything is computed; `release_copy_sources` says that these are made. `pop_stores`: block
    to slot, after `commit` and before the blocks change; `stored` says so. `disk.take_transfers`: between
    slots.

    While a sequence runs it references the slots of its exact blocks, so that of a chain the deepest slot is
    used again first. A slot that holds a block is in the index before the store has been made; `forget_slots`
    takes those out whose store has failed.

    Args:
        num_host_slots:       >= 1
        host_eviction_policy: of the slots
        store_after:          times that a block must have been met before it is stored, 1 for at once
        store_decoded:        whether blocks are stored that hold tokens behind the prompt
        num_disk_slots:       0 for no disk below the host
        disk_eviction_policy: of the file's slots
        disk_store_after:     times that a block must have been met before it is written to disk
        load_wait_s:          seconds that a sequence waits for what is being loaded, by tokens to load
        races:                whether sequences compute while blocks are loaded, and take over what has come
        load_is_worth:        whether loading so many tokens takes less time than computing them
        others:               of MemoryManager
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_slots: int,
        host_eviction_policy: str = "lru",
        store_after: int = 1,
        store_decoded: bool = True,
        num_disk_slots: int = 0,
        disk_eviction_policy: str = "lru",
        disk_store_after: int = 1,
        load_wait_s: Callable[[int], float] = lambda _: 10.0,
        races: bool = False,
        load_is_worth: Callable[[int], bool] = lambda _: True,
        **others: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, **others)
        if num_host_slots < 1:
            raise InvalidArgumentError(
                f"num_host_slots is {num_host_slots}; a tier has at least 1 slot; give the host more memory"
            )
        assert not self.windows.windows, "windows have no slots; the engine lets all layers share one table"
        self.host = Tier(num_host_slots, block_size, host_eviction_policy)
        self.disk = (
            DiskTier(self.host, num_disk_slots, block_size, disk_eviction_policy) if num_disk_slots else None
        )
        self.disk_store_after = disk_store_after
        self.load_wait_s, self.load_is_worth, self.races = load_wait_s, load_is_worth, races
        self.store_after = store_after
        self.store_decoded = store_decoded
        self.num_unstored = 0
        """Times that a block found no slot."""
        self.counts = TierCounts()
        self._below: dict[int, list[Entry]] = {}
        self._last_stored: dict[int, int] = {}
        self._loads: list[Move] = []
        self._stores: list[tuple[Entry, int]] = []
        self._reading: list[int] = []
        self._twins: dict[int, set[int]] = {}
        self._met: Counter[bytes] = Counter()
        self._asked: dict[int, int] = {}
        self._on_disk: dict[int, list[Entry]] = {}
        self._loading: dict[int, Loading] = {}
        self._from_disk: dict[int, int] = {}

    # What begins and ends.

    def match_prefix(self, keys: BlockKeys, *, max_tokens: int | None = None) -> PrefixMatch:
        match = super().match_prefix(keys, max_tokens=max_tokens)
        if not self.prefix.enabled:
            return match
        limit = keys.num_tokens - 1 if max_tokens is None else min(keys.num_tokens - 1, max_tokens)
        return self._with_lower(match, limit // self.block_size)

    @property
    def index_version(self) -> int:
        return super().index_version + self.host.pool.index.version

    def _with_lower(self, match: PrefixMatch, limit: int) -> PrefixMatch:
        """The match with the host's slots behind it, `limit` blocks at most in all."""
        known = len(match.entries)
        if known == limit:
            return match
        return replace(match, lower=tuple(self.host.run(match.keys, limit)[known:]))

    def admit(self, seq_id: int, match: PrefixMatch, *, priority: int = 0) -> None:
        super().admit(seq_id, match, priority=priority)
        table = self.table(seq_id)
        if not self.store_decoded:
            self._last_stored[seq_id] = match.keys.num_tokens // self.block_size
        self._load_prefix(table, match)
        self._follow(seq_id, table)
        self._count_below(seq_id, match)
        self.end_loading(seq_id)

    def _count_below(self, seq_id: int, match: PrefixMatch) -> None:
        """Every token that the pool might have had and had not is the host's, the disk's or a miss."""
        if match.miss == INELIGIBLE:
            return
        size, counts, loading = self.block_size, self.counts, self._loading.get(seq_id)
        num_lower, num_read = len(match.lower), 0 if loading is None else len(loading.linked)
        from_disk = min(num_lower, num_read) * size
        self._from_disk[seq_id] = from_disk
        counts.asked += ((match.keys.num_tokens - 1) // size - len(match.entries)) * size
        counts.from_disk += from_disk
        counts.from_host += num_lower * size - from_disk

    def num_from_disk(self, seq_id: int) -> int:
        """Tokens that a running sequence began with and that were read from disk while it waited."""
        return self._from_disk.get(seq_id, 0)

    def _load_prefix(self, table: BlockTable, match: PrefixMatch) -> None:
        """Fresh blocks for what the host has of a prefix, indexed at once: they are filled before anybody
        reads them."""
        if not match.lower:
            return
        slots = [entry.block for entry in match.lower]
        for slot in slots:
            self.host.pool.touch(slot)
        self._reading += slots
        blocks = self.pool.allocate(len(slots))
        self._loads += zip(slots, blocks, strict=True)
        table.append(blocks)
        table.advance(len(blocks) * self.block_size)
        self.prefix.enter_full_blocks(table, len(match.entries))
        self._note_twins([*(None for _ in match.entries), *slots], table)

    def extend(self, seq_id: int, max_tokens: int) -> int:
        """Let a sequence that computes its prompt go on behind what has come to the host meanwhile.

        Returns: tokens that it need not compute; they count as computed at return.
        """
        table, size = self.table(seq_id), self.block_size
        known = len(table.entries)
        if not self.races or table.chain is None or table.physical_len != len(table.block_ids) * size:
            return 0
        limit = min(table.keys.num_tokens - 1, max_tokens) // size
        found = self.host.run(table.keys, limit)[known : known + self.pool.num_free]
        if not found:
            return 0
        self._load_prefix(table, PrefixMatch(table.keys, tuple(table.entries), "", tuple(found)))
        return len(found) * size

    def _follow(self, seq_id: int, table: BlockTable) -> None:
        """Reference the slots that hold a sequence's first blocks from now on. What they lack is stored when
        it next commits: until then nobody may find it."""
        if table.chain is None:
            return
        known = self.host.run(table.keys, len(table.entries))
        self.host.pool.hit([entry.block for entry in known], table.priority)
        self._below[seq_id] = known
        if self.disk is not None:
            self._on_disk[seq_id] = known = self.disk.run(table.keys, len(table.entries))
            self.disk.tier.pool.hit([entry.block for entry in known], table.priority)

    def fork(self, parent_id: int, child_id: int, keys: BlockKeys) -> None:
        super().fork(parent_id, child_id, keys)
        if (known := self._below.get(parent_id)) is not None:
            for entry in known:
                self.host.pool.touch(entry.block)
            self._below[child_id] = known.copy()
        if self.disk is not None and (known := self._on_disk.get(parent_id)) is not None:
            for entry in known:
                self.disk.tier.pool.touch(entry.block)
            self._on_disk[child_id] = known.copy()
        if parent_id in self._last_stored:
            self._last_stored[child_id] = self._last_stored[parent_id]

    def free(self, seq_id: int) -> int:
        freed = super().free(seq_id)
        self._unfollow(seq_id)
        self._last_stored.pop(seq_id, None)
        self._asked.pop(seq_id, None)
        self._from_disk.pop(seq_id, None)
        return freed

    def _unfollow(self, seq_id: int) -> None:
        self.host.pool.release(entry.block for entry in reversed(self._below.pop(seq_id, ())))
        if self.disk is not None:
            known = self._on_disk.pop(seq_id, ())
            self.disk.tier.pool.release(entry.block for entry in reversed(known))

    # What is written through.

    def commit(self, seq_id: int, num_tokens: int, *, exact: bool = True) -> None:
        super().commit(seq_id, num_tokens, exact=exact)
        self._offer(seq_id, self.table(seq_id))

    def _offer(self, seq_id: int, table: BlockTable) -> None:
        """Slots for the exact full blocks of a sequence that have none yet, as long as there are some."""
        known = self._below.get(seq_id)
        if known is None:
            return
        if table.chain is None:
            self._unfollow(seq_id)
            return
        last = min(len(table.entries), self._last_stored.get(seq_id, len(table.entries)))
        self._note_met(seq_id, table, last)
        index, link = self.host.pool.index, known[-1] if known else self.host.root(table.keys.salt)
        for i in range(len(known), last):
            key = table.keys[i]
            entry = index.find(link, key)
            if entry is not None:
                self.host.pool.hit([entry.block], table.priority)
            elif (entry := self._store(table, i, link)) is None:
                break
            known.append(entry)
            link = entry

    def _offer_disk(self, seq_id: int, table: BlockTable) -> None:
        """The same for what the host holds and the disk does not. To be called when the host's slots have
        been filled."""
        above, known = self._below.get(seq_id, ()), self._on_disk.get(seq_id)
        if self.disk is None or known is None or not table.keys.lasting:
            return
        pool, met = self.disk.tier.pool, self.disk_store_after
        parent: Any = known[-1] if known else self.disk.root(table.keys.salt)
        for i in range(len(known), len(above)):
            key = table.keys[i]
            entry = pool.index.find(parent, key) if isinstance(parent, Link) else None
            if entry is not None and i == len(known):
                pool.hit([entry.block], table.priority)
                known.append(entry)
                parent = entry
                continue
            if (met > 1 and self._met[key.digest] < met) or not self.host.pool.index.is_live(above[i]):
                return
            parent = self.disk.store(table.keys, i, parent, above[i]) if entry is None else entry
            if parent is None:
                return

    def _store(self, table: BlockTable, i: int, link: Link) -> Entry | None:
        """A slot for block i of a table, behind this entry of the host; None if there is none, or if it is
        not to be stored yet. The slot is referenced."""
        key, pool = table.keys[i], self.host.pool
        met_enough = self.store_after <= 1 or self._met[key.digest] >= self.store_after
        if not met_enough or not pool.index.is_live(link):
            return None
        if not pool.num_free:
            self.num_unstored += 1
            return None
        (slot,) = pool.allocate(1)
        entry = pool.enter(slot, link, key, table.priority)
        if entry is None or entry.block != slot:
            pool.release([slot])
            return None
        self._stores.append((table.entries[i], slot))
        return entry

    def _note_met(self, seq_id: int, table: BlockTable, last: int) -> None:
        """A sequence has met its first `last` blocks; each counts once."""
        if max(self.store_after, self.disk_store_after) <= 1:
            return
        for i in range(self._asked.get(seq_id, 0), last):
            self._met[table.keys[i].digest] += 1
        self._asked[seq_id] = last
        if len(self._met) > 4 * self.host.pool.num_blocks:
            self._met = Counter({digest: count for digest, count in self._met.items() if count > 1})

    def forget_slots(self, slots: Sequence[int]) -> None:
        """What these slots were to hold could not be written: nothing finds them any more."""
        for slot in slots:
            self.host.pool.unindex(slot)

    def invalidate(self, seq_id: int) -> None:
        super().invalidate(seq_id)
        if self.disk is not None:
            self.disk.forget(self.table(seq_id).keys, self.num_below(seq_id))
            for entry in reversed(self._on_disk.get(seq_id, ())):
                self.disk.tier.pool.unindex(entry.block)
        for entry in reversed(self._below.get(seq_id, ())):
            self.host.pool.unindex(entry.block)
        self._unfollow(seq_id)

    def reset_prefix_cache(self, *, external: bool = True) -> None:
        """Reset the prefix cache. external: what lies below the pool is forgotten, too; on disk once the
        caller has done what `disk.take_reset` says."""
        super().reset_prefix_cache()
        if external:
            self.host.pool.clear_index()
            if self.disk is not None:
                self.disk.reset()
        for seq_id in list(self._below):
            self._unfollow(seq_id)

    def num_below(self, seq_id: int) -> int:
        """Leading blocks of a running sequence that the host holds under their prefix."""
        return len(self._below.get(seq_id, ()))

    # Moves.

    def pop_swap_ins(self) -> list[Move]:
        """(slot, block); of two loads into one block, which changed hands in this step, the last."""
        loads, self._loads = self._loads, []
        return [(slot, block) for block, slot in {block: slot for slot, block in loads}.items()]

    def pop_stores(self) -> list[Move]:
        """(block, slot) of blocks that have become full, or were met, and have not changed hands since."""
        stores, self._stores = self._stores, []
        is_live = self.pool.index.is_live
        self.forget_slots([slot for entry, slot in stores if not is_live(entry)])
        stores = [each for each in stores if is_live(each[0])]
        self._twins.update((slot, {entry.serial}) for entry, slot in stores)
        return [(entry.block, slot) for entry, slot in stores]

    def stored(self) -> None:
        """All slots that pop_stores named are filled or forgotten; the disk may have them."""
        for seq_id in self._on_disk:
            self._offer_disk(seq_id, self._tables[seq_id])

    # What comes from disk.

    def prefetch(self, seq_id: int, keys: BlockKeys, max_tokens: int) -> None:
        """Begin to load what a sequence that waits would hit on disk and nowhere above."""
        if self.disk is None or not self.prefix.enabled or not keys.lasting:
            return
        limit = min(keys.num_tokens - 1, max_tokens) // self.block_size
        if len(super().match_prefix(keys, max_tokens=max_tokens).entries) >= limit:
            return
        missing = len(self.disk.run(keys, limit)) - len(self.host.run(keys, limit))
        num_tokens = missing * self.block_size
        if missing > 0 and self.load_is_worth(num_tokens):
            most = min(keys.num_tokens - 1, max_tokens)
            loading = self.disk.load(keys, most, self._clock() + self.load_wait_s(num_tokens))
            if loading is not None:
                self._loading[seq_id] = loading
                for transfer in loading.transfers:
                    self._twins.pop(transfer.host_slot, None)

    def must_wait(self, seq_id: int) -> bool:
        """Whether a sequence is to wait for what is being loaded for it."""
        loading = self._loading.get(seq_id)
        if loading is not None and loading.after is not None and not loading.is_pending:
            self.end_loading(seq_id)
            self.prefetch(seq_id, loading.keys, loading.max_tokens)
            loading = self._loading.get(seq_id)
        return loading is not None and loading.is_pending and self._clock() < loading.deadline

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for what is being loaded for them."""
        now = self._clock()
        return sum(each.is_pending and now < each.deadline for each in self._loading.values())

    def is_twin(self, entry: Entry, above: Entry) -> bool:
        """Whether a host slot holds the very bytes of the pool's block of this entry."""
        return self.host.pool.index.is_live(entry) and above.serial in self._twins.get(entry.block, ())

    def _note_twins(self, slots: Sequence[int | None], table: BlockTable) -> None:
        """The table's blocks are filled from these slots."""
        for slot, block, entry in zip(slots, table.block_ids, table.entries, strict=False):
            if slot is not None and entry.block == block:
                self._twins.setdefault(slot, set()).add(entry.serial)

    def end_loading(self, seq_id: int) -> None:
        """A sequence has begun, or will not."""
        loading = self._loading.pop(seq_id, None)
        if loading is not None and self.disk is not None:
            self.disk.end(loading)

    def release_copy_sources(self) -> None:
        super().release_copy_sources()
        self.host.pool.release(reversed(self._reading))
        self._reading.clear()

    def check(self) -> None:
        super().check()
        held = self._slots_held()
        if self.disk is not None:
            above, on_disk = self.disk.references()
            held += above
            for entries in self._on_disk.values():
                on_disk.update(entry.block for entry in entries)
            _check_slots("disk", self.disk.tier.pool, on_disk)
        _check_slots("host", self.host.pool, held)

    def _slots_held(self) -> Counter[int]:
        """References to host slots but for those of transfers; for checks."""
        held = Counter(self._reading)
        for loading in self._loading.values():
            held.update([*loading.held, *(entry.block for entry in loading.linked)])
        for entries in self._below.values():
            held.update(entry.block for entry in entries)
        return held


def _check_slots(name: str, pool: BlockPool, held: Counter[int]) -> None:
    pool.check()
    references = {slot: refs for slot, refs in enumerate(pool.refs) if refs}
    assert held == references, f"{name} slots: {dict(held)} held, {references} in the pool"
