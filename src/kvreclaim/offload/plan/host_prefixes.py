"""Decides which exact prefix blocks are written to host slots, finds them there and loads them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.offload import Move
from kvreclaim.memory.prefix.index import Entry, Link
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.offload.plan.states import HostStates
from kvreclaim.offload.plan.tier import Tier


class HostPrefixes:
    """Which host slots hold which blocks of running sequences, and what is to be moved for that.

    A slot that holds a block is in the index before the store has been made; `forget_slots` takes out those
    that could not be written.

    Args:
        full:          the group of these blocks
        tier:          the slots
        disk:          slots of a file below them; None: there is none
        states:        of recurrent layers, behind some of these blocks; None: blocks need none
        store_after:   times that a block must have been met before it is stored, 1 for at once
        store_decoded: whether blocks are stored that hold tokens behind the prompt
        count_to:      largest number of times met that is of interest; 1: nothing is counted
        races:         whether sequences compute while blocks are loaded, and take over what has come
    """

    def __init__(
        self,
        full: FullAttentionGroup,
        tier: Tier,
        disk: Tier | None,
        states: HostStates | None,
        *,
        store_after: int,
        store_decoded: bool,
        count_to: int,
        races: bool,
    ) -> None:
        self.tier, self.states = tier, states
        self._tiers = (tier,) if disk is None else (tier, disk)
        self.num_unstored = 0
        """Times that a block found no slot."""
        self.met: Counter[bytes] = Counter()
        self.twins: dict[int, set[int]] = {}
        """Serials of the pool's entries whose blocks hold the very bytes of a slot."""
        self.num_from_disk: dict[int, int] = {}
        """By running sequence: blocks that it began with and that were read from disk while it waited."""
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
        run = self.tier.run(match.keys, limit)
        if self.states is not None:
            return self.states.best(match, whole, run)
        return replace(match, lower=tuple(run[len(match.entries) :]))

    # Sequences.

    def admit(self, seq_id: int, table: BlockTable, match: PrefixMatch) -> None:
        """A sequence begins with a match, slots included."""
        if not self._store_decoded:
            self._last_stored[seq_id] = match.keys.num_tokens // self._size
        self._load(table, match)
        if self.states is not None:
            self.states.begin(seq_id, match)

    def _load(self, table: BlockTable, match: PrefixMatch) -> None:
        """Take fresh blocks for a match's slots, and index them at once: they are filled before any read."""
        if not match.lower:
            return
        slots = [entry.block for entry in match.lower]
        for slot in slots:
            self.tier.pool.touch(slot)
        self._reading += slots
        blocks = self._pool.allocate(len(slots))
        self.loads += zip(slots, blocks, strict=True)
        table.append(blocks)
        table.advance(len(blocks) * self._size)
        self._full.prefix.enter_full_blocks(table, len(match.entries))
        self.note_twins([*(None for _ in match.entries), *slots], table)

    def extend(self, table: BlockTable, max_tokens: int) -> int:
        """Let a sequence that computes its prompt go on behind blocks that have come to the host meanwhile.

        Returns: tokens that it need not compute; they count as computed at return.
        """
        size, known = self._size, len(table.entries)
        if not self._races or table.chain is None or table.physical_len != len(table.block_ids) * size:
            return 0
        limit = min(table.keys.num_tokens - 1, max_tokens) // size
        found = self.tier.run(table.keys, limit)[known : known + self._pool.num_free]
        if not found:
            return 0
        self._load(table, PrefixMatch(table.keys, tuple(table.entries), "", tuple(found)))
        return len(found) * size

    def follow(self, seq_id: int, table: BlockTable) -> None:
        """Reference the slots that hold a sequence's first blocks from now on, in all tiers. Blocks that the
        host lacks are stored when the sequence next commits: they can't be found before."""
        for tier in self._tiers:
            tier.follow(seq_id, table)
        if self.states is not None:
            self.states.met(table, self.tier.followed[seq_id])

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let the child reference its parent's slots."""
        for tier in self._tiers:
            tier.fork(parent_id, child_id)
        if parent_id in self._last_stored:
            self._last_stored[child_id] = self._last_stored[parent_id]

    def unfollow(self, seq_id: int) -> None:
        """Drop the sequence's references to slots, in all tiers."""
        for tier in self._tiers:
            tier.unfollow(seq_id)

    def free(self, seq_id: int) -> None:
        """A sequence has ended."""
        self.unfollow(seq_id)
        if self.states is not None:
            self.states.free(seq_id)
        for by_sequence in (self._last_stored, self._num_met, self.num_from_disk):
            by_sequence.pop(seq_id, None)

    # Stores.

    def offer(self, seq_id: int, table: BlockTable) -> None:
        """Give slots to the exact full blocks of a sequence that lack one, as long as slots are free."""
        known = self.tier.followed.get(seq_id)
        if known is None:
            return
        last = min(len(table.entries), self._last_stored.get(seq_id, len(table.entries)))
        self._note_met(seq_id, table, last)
        first, index = len(known), self.tier.pool.index
        link = known[-1] if known else self.tier.root(table.keys.salt)
        for i in range(first, last):
            entry = index.find(link, table.keys[i])
            if entry is not None:
                self.tier.pool.hit([entry.block], table.priority)
            elif (entry := self._store(table, i, link)) is None:
                break
            known.append(entry)
            link = entry
        if self.states is not None:
            self.states.offer(seq_id, table, known, first)

    def _store(self, table: BlockTable, i: int, link: Link) -> Entry | None:
        """Give a referenced slot to block i of a table, behind this entry of the host; None if none is free,
        or the block is not to be stored yet."""
        key, pool = table.keys[i], self.tier.pool
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
        if len(self.met) > 4 * self.tier.pool.num_blocks:
            self.met = Counter({digest: count // 2 for digest, count in self.met.items() if count > 1})

    # Moves.

    def pop_moves_in(self) -> list[Move]:
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
            self.tier.pool.unindex(slot)

    def release_copy_sources(self) -> None:
        """The loads are made."""
        self.tier.pool.release(reversed(self._reading))
        self._reading.clear()

    # Slots that hold the very bytes of a block.

    def is_twin(self, entry: Entry, above: Entry) -> bool:
        """Whether a host slot holds the very bytes of the pool's block of this entry."""
        return self.tier.pool.index.is_live(entry) and above.serial in self.twins.get(entry.block, ())

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
        """References of running sequences and loads to host slots; for checks."""
        return Counter(self._reading) + self.tier.references()
