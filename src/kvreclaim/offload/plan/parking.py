"""Parked sequences, which give their blocks back and keep the content in host slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.offload import Move, Parked, ParkingSlots
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.offload.plan.host_prefixes import HostPrefixes
from kvreclaim.offload.plan.states import HostStates


class ParkedSequences(ParkingSlots):
    """Keeps the content of sequences without blocks in host slots.

    The moves of a parked sequence are in `pop_moves_out`: block to slot, before anything else in a step. The
    moves of a resumed one are in `pop_moves_in`.

    Args:
        full:       the group of these blocks
        prefixes:   on the host, which parked sequences share
        max_parked: slots that parked sequences may have for themselves; None: all
        states:     of recurrent layers, parked with the blocks; None: the model has none
        on_host:    slots for the states of sequences that never run; at most half of them are for these
    """

    def __init__(
        self,
        full: FullAttentionGroup,
        prefixes: HostPrefixes,
        max_parked: int | None,
        states: RecurrentGroup | None,
        on_host: HostStates | None,
    ) -> None:
        self.max_parked = prefixes.tier.pool.num_blocks if max_parked is None else max_parked
        self.num_resumed_blocks = 0
        """Blocks that were moved back."""
        self._full, self._pool, self._size = full, full.pool, full.block_size
        self._states, self._on_host = states, on_host
        self._state_slots: dict[int, int] = {}
        self._prefixes, self._slots = prefixes, prefixes.tier.pool
        self._parked: dict[int, Parked] = {}
        self._resumed: dict[int, Parked] = {}
        self._own: Counter[int] = Counter()
        self._leaving: dict[int, int] = {}
        self._coming: dict[int, int] = {}
        self._copied: dict[int, int] = {}

    @property
    def num_parked(self) -> int:
        """Sequences."""
        return len(self._parked)

    @property
    def num_parked_slots(self) -> int:
        """Slots that parked sequences have for themselves, each counted once."""
        return len(self._own)

    def is_parked(self, seq_id: int) -> bool:
        return seq_id in self._parked

    def num_to_park(self, seq_ids: Iterable[int]) -> int:
        """Slots that have to be filled to park these sequences: for blocks that no slot holds yet."""
        blocks = set[int | None]()
        for seq_id in seq_ids:
            table = self._full.tables[seq_id]
            blocks.update(self._sources(table, len(self._slots_below(seq_id, table))))
        return len(blocks - self._leaving.keys() - {None})

    def can_park(self, seq_ids: Sequence[int]) -> bool:
        """Whether there are slots to park all of these, one after the other."""
        if all(seq_id in self._resumed for seq_id in seq_ids):
            return True
        refs = self._slots.refs
        below = {slot for each in seq_ids for slot in self._slots_below(each, self._full.tables[each])}
        new, queued = self.num_to_park(seq_ids), sum(not refs[slot] for slot in below)
        return new + queued <= self._slots.num_free and len(self._own) + new <= self.max_parked

    def _sources(self, table: BlockTable, first: int) -> list[int | None]:
        """Where the tokens of its entries from `first` on lie before this step's copies; None: a hole."""
        held = table.block_ids[first : blocks_for(table.physical_len, self._size)]
        return [None if block is None else self._copied.get(block, block) for block in held]

    def _slots_below(self, seq_id: int, table: BlockTable) -> list[int]:
        """Slots that hold, to the bit, what the first blocks of an exact sequence do: the same tokens,
        computed by another one, may have been rounded otherwise."""
        slots: list[int] = []
        for i, entry in enumerate(
            self._prefixes.tier.followed.get(seq_id, ()) if table.chain is not None else ()
        ):
            if not self._is_own(table, i) or not self._prefixes.is_twin(entry, table.entries[i]):
                break
            slots.append(entry.block)
        return slots

    @staticmethod
    def _is_own(table: BlockTable, i: int) -> bool:
        """Whether what the index has for block i of a table is that very block."""
        return table.entries[i].block == table.block_ids[i]

    def park(self, seq_id: int) -> bool:
        """Let a sequence give its blocks back and keep what they hold, which is to be moved (`pop_moves_out`)
        before anything is written; blocks that others have left in this step, too, are moved once. Returns:
        whether there were slots; if not, nothing has changed.

        One that has come back in this step has its slots still, and nothing is moved.
        """
        table = self._full.tables[seq_id]
        if seq_id in self._resumed:
            self._parked[seq_id] = self._resumed.pop(seq_id)
            self._free(seq_id)
            return True
        below = self._slots_below(seq_id, table)
        rest = self._sources(table, len(below))
        new = [block for block in rest if block is not None and block not in self._leaving]
        if len(new) > self._slots.num_free or len(self._own) + len(new) > self.max_parked:
            return False
        for slot in below:
            self._slots.touch(slot)
        for block in rest:
            if block in self._leaving:
                self._slots.touch(self._leaving[block])
        slots = self._slots.allocate(len(new))
        self._leaving.update(zip(new, slots, strict=True))
        self._prefixes.forget_twins(slots)
        own = tuple(None if block is None else self._leaving[block] for block in rest)
        root = self._pool.index.root(None).serial
        self._parked[seq_id] = parked = Parked(table, (*below, *own), len(below), root)
        self._own.update(parked.own)
        if table.chain is not None:
            self._prefixes.note_twins(parked.slots, table)
        self._free(seq_id)
        return True

    def park_idle(self, seq_id: int) -> bool:
        if seq_id in self._resumed:
            return self.park(seq_id)
        if not self._take_state_slot(seq_id):
            return False
        if self.park(seq_id):
            return True
        self._give_back_state_slot(seq_id)
        return False

    def _take_state_slot(self, seq_id: int) -> bool:
        """Take a slot for a state, if the model has states. Returns: False if none is free."""
        if self._states is None:
            return True
        if self._on_host is None or 2 * len(self._state_slots) >= self._on_host.slots.num_slots:
            return False
        if (slot := self._on_host.slots.take()) is not None:
            self._state_slots[seq_id] = slot
        return slot is not None

    def _give_back_state_slot(self, seq_id: int) -> None:
        if (slot := self._state_slots.pop(seq_id, None)) is not None:
            assert self._on_host is not None, "it was taken there"
            self._on_host.slots.release(slot)

    def state_slot(self, seq_id: int) -> int:
        return self._state_slots[seq_id]

    @property
    def state_slots(self) -> list[int]:
        """Slots of parked sequences that never run."""
        return list(self._state_slots.values())

    def enter_parked(self, seq_id: int, table: BlockTable) -> tuple[int | None, ...] | None:
        """Let an inexact sequence that comes from elsewhere, and never runs, be parked; its block ids stand
        for any blocks.

        Returns: slots of its table's entries, to be filled before it is resumed; None if there are too few.
        """
        assert table.chain is None, "what is exact is found by its prefix"
        held = table.block_ids[: blocks_for(table.physical_len, self._size)]
        num_own = len(held) - held.count(None)
        if num_own > self._slots.num_free or len(self._own) + num_own > self.max_parked:
            return None
        if not self._take_state_slot(seq_id):
            return None
        if self._states is not None:
            self._states.enter(seq_id, parked=True)
        own = self._slots.allocate(num_own)
        self._prefixes.forget_twins(own)
        supply = iter(own)
        slots = tuple(None if block is None else next(supply) for block in held)
        root = self._pool.index.root(None).serial
        self._parked[seq_id] = parked = Parked(table, slots, 0, root)
        self._own.update(parked.own)
        return slots

    def match_parked(self, seq_id: int) -> PrefixMatch:
        """Match what the pool has of a parked sequence, to the bit: of one that is exact, blocks that it had,
        or that were filled from its slots for another one."""
        parked = self._parked[seq_id]
        table = parked.table
        if table.chain is None or not self._goes_on(parked):
            return PrefixMatch(table.keys, (), "")
        match = self._full.prefix.match(table.keys, table.physical_len)
        pairs = zip(match.entries, parked.held, strict=False)
        same = takewhile(lambda pair: pair[0].serial in self._prefixes.twins.get(pair[1], ()), pairs)
        return replace(match, entries=match.entries[: len(list(same))])

    def num_to_resume(self, seq_id: int, match: PrefixMatch, others: Sequence[int] = ()) -> int:
        """Blocks that it takes besides the match, its own next tokens not counted, with others that come back
        with it and share its full blocks."""
        needed = len(self._parked[seq_id].held) - len(match.entries) - self.num_coming(seq_id, match)
        known = set(self._full_slots(self._parked[seq_id]))
        for other in others:
            parked = self._parked[other]
            full = [slot for slot in self._full_slots(parked) if slot not in known]
            needed += len(full) + len(parked.held) - len(self._full_slots(parked))
            known.update(full)
        return needed

    def _full_slots(self, parked: Parked) -> list[int]:
        """Slots that hold its full blocks."""
        slots = parked.slots[: parked.table.physical_len // self._size]
        return [slot for slot in slots if slot is not None]

    def num_coming(self, seq_id: int, match: PrefixMatch) -> int:
        """Blocks that it would share with others that have come back in this step, besides the match."""
        return len(self._coming_for(self._parked[seq_id], len(match.entries)))

    def _coming_for(self, parked: Parked, first: int) -> dict[int, int]:
        """Places in its table from `first` on, of full blocks that this step loads for another one anyway."""
        slots = enumerate(parked.slots[first : parked.table.physical_len // self._size], first)
        return {i: self._coming[slot] for i, slot in slots if slot is not None and slot in self._coming}

    def parked(self, seq_id: int) -> Parked:
        """The record of a sequence that is parked, or was until this step."""
        found = self._parked.get(seq_id)
        return self._resumed[seq_id] if found is None else found

    def resume(self, seq_id: int, match: PrefixMatch) -> None:
        """Bring a parked sequence back, as it was, in other blocks, with a match made in this step."""
        self._full.refuse_known(seq_id)
        parked = self._parked.pop(seq_id)
        self._resumed[seq_id] = parked
        table, num_hit = parked.table, len(match.entries)
        self._pool.hit(match.block_ids, table.priority)
        ids = [*match.block_ids, *self._load_parked(parked, num_hit)]
        back = replace(table, block_ids=ids, version=table.version + 1)
        if table.chain is not None:
            back.chain, back.entries = None, list(match.entries)
            if self._goes_on(parked):
                back.chain = match.entries[-1] if num_hit else self._pool.index.root(table.keys.salt)
                self._full.prefix.enter_full_blocks(back, num_hit)
                self._prefixes.note_twins(parked.slots, back)
        self._full.add(seq_id, back)
        if self._states is not None:
            self._states.resume(seq_id)
        if back.chain is not None:
            self._prefixes.follow(seq_id, back)

    def _load_parked(self, parked: Parked, first: int) -> list[int | None]:
        """Blocks for its entries from there on, to be filled from its slots; a full one that is filled for
        another one is shared."""
        coming, full = self._coming_for(parked, first), parked.table.physical_len // self._size
        for block in coming.values():
            self._pool.touch(block)
        rest = parked.slots[first:]
        supply = iter(self._pool.allocate(len(rest) - rest.count(None) - len(coming)))
        blocks = list[int | None]()
        for i, slot in enumerate(rest, first):
            if slot is None or i in coming:
                blocks.append(coming.get(i))
                continue
            blocks.append(block := next(supply))
            self.num_resumed_blocks += 1
            self._prefixes.loads.append((slot, block))
            if i < full:
                self._coming[slot] = block
        return blocks

    def _free(self, seq_id: int) -> None:
        """A sequence gives its blocks back."""
        self._full.free(seq_id, self._full.tables[seq_id])
        if self._states is not None:
            self._states.park(seq_id)
        self._prefixes.free(seq_id)
        self.freed()

    def freed(self) -> None:
        """Blocks have gone back to the pool: no sequence comes back into them."""
        refs = self._pool.refs
        self._coming = {slot: block for slot, block in self._coming.items() if refs[block]}

    def drop_parked(self, seq_id: int) -> None:
        """A parked sequence has ended, or is to be computed anew."""
        parked = self._parked.pop(seq_id, None)
        if parked is not None:
            self._release_parked(seq_id, parked)
            if self._states is not None:
                self._states.drop_parked(seq_id)

    def _release_parked(self, seq_id: int, parked: Parked) -> None:
        self._give_back_state_slot(seq_id)
        self._own.subtract(parked.own)
        self._own = +self._own
        self._slots.release(reversed(parked.held))
        refs = self._slots.refs
        self._leaving = {block: slot for block, slot in self._leaving.items() if refs[slot]}

    def _goes_on(self, parked: Parked) -> bool:
        """Whether its chain's root is still the index's."""
        return parked.root == self._pool.index.root(None).serial

    def copied(self, copies: Sequence[Move]) -> None:
        """These sources are to be copied to these targets in this step."""
        self._copied.update((target, source) for source, target in copies)

    def loaded(self) -> None:
        """The loads of this step are taken: they are shared no more."""
        self._coming.clear()

    def pop_moves_out(self) -> list[Move]:
        outs = list(self._leaving.items())
        self._leaving.clear()
        return outs

    def release_copy_sources(self) -> None:
        """The step's copies and loads have been made."""
        self._copied.clear()
        for seq_id, parked in self._resumed.items():
            self._release_parked(seq_id, parked)
        self._resumed.clear()

    def check(self) -> None:
        """Raises AssertionError unless slots and sequences agree."""
        own = Counter(slot for one in self._all_parked() for slot in one.own)
        assert own == self._own, f"slots of parked ones: {own}, counted {self._own}"
        assert len(own) <= self.max_parked, f"{len(own)} slots of parked ones, {self.max_parked} allowed"
        indexed = [slot for slot in own if slot in self._slots.index]
        assert not indexed, f"slot {indexed[:1]} of a parked sequence is in the host's index"
        assert not self._parked.keys() & self._full.tables.keys(), "a sequence has blocks and is parked"

    def references(self) -> Counter[int]:
        """References to host slots; for checks."""
        return Counter(slot for one in self._all_parked() for slot in one.held)

    def _all_parked(self) -> list[Parked]:
        return [*self._parked.values(), *self._resumed.values()]
