"""Exact prefixes in host slots: written through to them, found there, and brought back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.offload import Move
from kvreclaim.memory.prefix.index import Entry, Link
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.memory.tiers.host_states import NoHostStates
from kvreclaim.memory.tiers.tier import Tier


class HostPrefixes:
    """Which host slots hold which blocks of running sequences, and what is to be moved for that.

    While a sequence runs it references the slots of its exact blocks, so that of a chain the deepest slot is
    used again first. A slot that holds a block is in the index before the store has been made; `forget_slots`
    takes those out whose store has failed.

    Args:
        full:          the group whose blocks are stored
        host:          the slots
        states:        of recurrent layers, behind some of these blocks
        store_after:   times that a block must have been met before it is stored, 1 for at once
        store_decoded: whether blocks are stored that hold tokens behind the prompt
        count_to:      times met that somebody asks for; 1: nothing is counted
        races:         whether sequences compute while blocks are loaded, and take over what has come
    """

    def __init__(
        self,
        full: FullAttentionGroup,
        host: Tier,
        states: NoHostStates,
        *,
        store_after: int,
        store_decoded: bool,
        count_to: int,
        races: bool,
    ) -> None:
        self.host, self.states = host, states
        self.num_unstored = 0
        """Times that a block found no slot."""
        self.met: Counter[bytes] = Counter()
        self.twins: dict[int, set[int]] = {}
        """Serials of the pool's entries whose blocks hold the very bytes of a slot."""
        self.below: dict[int, list[Entry]] = {}
        """The slots' entries that a running sequence references, in the order of its blocks."""
        self.loads: list[Move] = []
        self._full, self._pool, self._size = full, full.pool, full.block_size
        self._store_after, self._store_decoded = store_after, store_decoded
        self._count_to, self._races = count_to, races
        self._last_stored: dict[int, int] = {}
        self._stores: list[tuple[Entry, int]] = []
        self._reading: list[int] = []
        self._num_met: dict[int, int] = {}

    def with_lower(self, match: PrefixMatch, whole: PrefixMatch, limit: int) -> PrefixMatch:
        """The match with the host's slots behind it, `limit` blocks at most in all."""
        if len(match.entries) == limit:
            return match
        return self.states.best(match, whole, self.host.run(match.keys, limit))

    # Who holds what.

    def admit(self, seq_id: int, table: BlockTable, match: PrefixMatch) -> None:
        """A sequence begins with a match, slots included."""
        if not self._store_decoded:
            self._last_stored[seq_id] = match.keys.num_tokens // self._size
        self._load(table, match)
        self.states.begin(seq_id, match)

    def _load(self, table: BlockTable, match: PrefixMatch) -> None:
        """Fresh blocks for what the host has of a prefix, indexed at once: they are filled before anybody
        reads them."""
        if not match.lower:
            return
        slots = [entry.block for entry in match.lower]
        for slot in slots:
            self.host.pool.touch(slot)
        self._reading += slots
        blocks = self._pool.allocate(len(slots))
        self.loads += zip(slots, blocks, strict=True)
        table.append(blocks)
        table.advance(len(blocks) * self._size)
        self._full.prefix.enter_full_blocks(table, len(match.entries))
        self.note_twins([*(None for _ in match.entries), *slots], table)

    def extend(self, table: BlockTable, max_tokens: int) -> int:
        """Let a sequence that computes its prompt go on behind what has come to the host meanwhile.

        Returns: tokens that it need not compute; they count as computed at return.
        """
        size, known = self._size, len(table.entries)
        if not self._races or table.chain is None or table.physical_len != len(table.block_ids) * size:
            return 0
        limit = min(table.keys.num_tokens - 1, max_tokens) // size
        found = self.host.run(table.keys, limit)[known : known + self._pool.num_free]
        if not found:
            return 0
        self._load(table, PrefixMatch(table.keys, tuple(table.entries), "", tuple(found)))
        return len(found) * size

    def follow(self, seq_id: int, table: BlockTable) -> None:
        """Reference the slots that hold a sequence's first blocks from now on. What they lack is stored when
        it next commits: until then nobody may find it."""
        known = self.host.run(table.keys, len(table.entries))
        self.host.pool.hit([entry.block for entry in known], table.priority)
        self.below[seq_id] = known
        self.states.met(table, known)

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child references the same slots."""
        if (known := self.below.get(parent_id)) is not None:
            for entry in known:
                self.host.pool.touch(entry.block)
            self.below[child_id] = known.copy()
        if parent_id in self._last_stored:
            self._last_stored[child_id] = self._last_stored[parent_id]

    def unfollow(self, seq_id: int) -> None:
        """The sequence references no slots any more."""
        self.host.pool.release(entry.block for entry in reversed(self.below.pop(seq_id, ())))

    def free(self, seq_id: int) -> None:
        """A sequence is gone."""
        self.unfollow(seq_id)
        self.states.free(seq_id)
        self._last_stored.pop(seq_id, None)
        self._num_met.pop(seq_id, None)

    def invalidate(self, seq_id: int) -> None:
        """Nothing finds the sequence's slots any more."""
        for entry in reversed(self.below.get(seq_id, ())):
            self.host.pool.unindex(entry.block)

    # What is written through.

    def offer(self, seq_id: int, table: BlockTable) -> None:
        """Slots for the exact full blocks of a sequence that have none yet, as long as there are some."""
        known = self.below.get(seq_id)
        if known is None:
            return
        last = min(len(table.entries), self._last_stored.get(seq_id, len(table.entries)))
        self._note_met(seq_id, table, last)
        first, index, link = (
            len(known),
            self.host.pool.index,
            known[-1] if known else self.host.root(table.keys.salt),
        )
        for i in range(first, last):
            entry = index.find(link, table.keys[i])
            if entry is not None:
                self.host.pool.hit([entry.block], table.priority)
            elif (entry := self._store(table, i, link)) is None:
                break
            known.append(entry)
            link = entry
        self.states.offer(seq_id, table, known, first)

    def _store(self, table: BlockTable, i: int, link: Link) -> Entry | None:
        """A slot for block i of a table, behind this entry of the host; None if there is none, or if it is
        not to be stored yet. The slot is referenced."""
        key, pool = table.keys[i], self.host.pool
        met_enough = self._store_after <= 1 or self.met[key.digest] >= self._store_after
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
        if self._count_to <= 1:
            return
        for i in range(self._num_met.get(seq_id, 0), last):
            self.met[table.keys[i].digest] += 1
        self._num_met[seq_id] = last
        if len(self.met) > 4 * self.host.pool.num_blocks:
            self.met = Counter({digest: count for digest, count in self.met.items() if count > 1})

    # Moves.

    def pop_swap_ins(self) -> list[Move]:
        """(slot, block); of two loads into one block, which changed hands in this step, the last."""
        loads, self.loads = self.loads, []
        return [(slot, block) for block, slot in {block: slot for slot, block in loads}.items()]

    def pop_stores(self) -> list[Move]:
        """(block, slot) of blocks that have become full, or were met, and have not changed hands since."""
        stores, self._stores = self._stores, []
        is_live = self._pool.index.is_live
        self.forget_slots([slot for entry, slot in stores if not is_live(entry)])
        stores = [each for each in stores if is_live(each[0])]
        self.twins.update((slot, {entry.serial}) for entry, slot in stores)
        return [(entry.block, slot) for entry, slot in stores]

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Forget slots that could not be written: nothing finds them any more."""
        for slot in slots:
            self.host.pool.unindex(slot)

    def release_copy_sources(self) -> None:
        """The loads are made."""
        self.host.pool.release(reversed(self._reading))
        self._reading.clear()

    # Slots that hold the very bytes of a block.

    def is_twin(self, entry: Entry, above: Entry) -> bool:
        """Whether a host slot holds the very bytes of the pool's block of this entry."""
        return self.host.pool.index.is_live(entry) and above.serial in self.twins.get(entry.block, ())

    def note_twins(self, slots: Sequence[int | None], table: BlockTable) -> None:
        """The table's blocks are filled from these slots."""
        for slot, block, entry in zip(slots, table.block_ids, table.entries, strict=False):
            if slot is not None and entry.block == block:
                self.twins.setdefault(slot, set()).add(entry.serial)

    def forget_twins(self, slots: Sequence[int]) -> None:
        """These slots get another content."""
        for slot in slots:
            self.twins.pop(slot, None)

    def references(self) -> Counter[int]:
        """To host slots, for running sequences and loads; for checks."""
        held = Counter(self._reading)
        for entries in self.below.values():
            held.update(entry.block for entry in entries)
        return held
