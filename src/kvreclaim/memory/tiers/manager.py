"""The memory whose sequences may give their blocks back and keep what they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import takewhile
from typing import Any

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import Growth
from kvreclaim.memory.prefix.cache import PrefixMatch
from kvreclaim.memory.tiers.parked import Parked
from kvreclaim.memory.tiers.through import Move, WriteThrough


class TieredMemory(WriteThrough):
    """Parks sequences in host slots. What is moved for that: `take_outs`, block to slot, before anything else
    of a step, loads included; and when it comes back, with the loads.

    Args:
        max_parked: slots that parked sequences may have for themselves; None: all
        others:     of WriteThrough and MemoryManager
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, max_parked: int | None = None, **others: Any
    ) -> None:
        super().__init__(num_blocks, block_size, **others)
        self.max_parked = self.host.pool.num_blocks if max_parked is None else max_parked
        self._parked: dict[int, Parked] = {}
        self._resumed: dict[int, Parked] = {}
        self._num_own = 0
        self._outs: list[Move] = []
        self._copied: dict[int, int] = {}

    @property
    def num_parked(self) -> int:
        """Sequences."""
        return len(self._parked)

    @property
    def num_parked_slots(self) -> int:
        """That parked sequences have for themselves."""
        return self._num_own

    def is_parked(self, seq_id: int) -> bool:
        return seq_id in self._parked

    def num_to_park(self, seq_id: int) -> int:
        """Slots that have to be filled to park a sequence: for blocks that no slot holds yet."""
        table = self.table(seq_id)
        held = table.block_ids[: blocks_for(table.physical_len, self.block_size)]
        return len(held) - held.count(None) - len(self._slots_below(seq_id, table))

    def _slots_below(self, seq_id: int, table: BlockTable) -> list[int]:
        """Slots that hold, to the bit, what the first blocks of an exact sequence do: the same tokens,
        computed by another one, may have been rounded otherwise."""
        slots: list[int] = []
        for i, entry in enumerate(self._below.get(seq_id, ()) if table.chain is not None else ()):
            if not self._is_own(table, i) or not self.is_twin(entry, table.entries[i]):
                break
            slots.append(entry.block)
        return slots

    @staticmethod
    def _is_own(table: BlockTable, i: int) -> bool:
        """Whether what the index has for block i of a table is that very block."""
        return table.entries[i].block == table.block_ids[i]

    def park(self, seq_id: int) -> bool:
        """Let a sequence give its blocks back and keep what they hold, which is to be moved (`outs`) before
        anything is written. Returns: whether there were slots; if not, nothing has changed.

        One that has come back in this step has its slots still, and nothing is moved.
        """
        table = self.table(seq_id)
        if seq_id in self._resumed:
            self._parked[seq_id] = self._resumed.pop(seq_id)
            self.free(seq_id)
            return True
        num_own = self.num_to_park(seq_id)
        if num_own > self.host.pool.num_free or self._num_own + num_own > self.max_parked:
            return False
        below = self._slots_below(seq_id, table)
        for slot in below:
            self.host.pool.touch(slot)
        rest = table.block_ids[len(below) : blocks_for(table.physical_len, self.block_size)]
        own = self.host.pool.allocate(num_own)
        held = [block for block in rest if block is not None]
        self._outs += ((self._copied.get(block, block), slot) for block, slot in zip(held, own, strict=True))
        supply = iter(own)
        slots = (*below, *(None if block is None else next(supply) for block in rest))
        self._num_own += num_own
        tail = table.begun(self.block_size)
        tail = None if tail is None else self._copied.get(tail, tail)
        self._parked[seq_id] = Parked(table, slots, num_own, tail, self.pool.index.root(None).serial)
        self.free(seq_id)
        return True

    def enter_parked(self, seq_id: int, table: BlockTable) -> tuple[int | None, ...] | None:
        """Let an inexact sequence that comes from elsewhere be parked; its block ids stand for any blocks.

        Returns: slots of its table's entries, to be filled before it is resumed; None if there are too few.
        """
        assert table.chain is None, "what is exact is found by its prefix"
        held = table.block_ids[: blocks_for(table.physical_len, self.block_size)]
        num_own = len(held) - held.count(None)
        if num_own > self.host.pool.num_free or self._num_own + num_own > self.max_parked:
            return None
        supply = iter(self.host.pool.allocate(num_own))
        slots = tuple(None if block is None else next(supply) for block in held)
        self._num_own += num_own
        root = self.pool.index.root(None).serial
        self._parked[seq_id] = Parked(table, slots, num_own, table.begun(self.block_size), root)
        return slots

    def match_parked(self, seq_id: int) -> PrefixMatch:
        """What of a parked sequence the pool still has: the very blocks that it had, of one that is exact."""
        parked = self._parked[seq_id]
        table = parked.table
        if table.chain is None or not self._goes_on(parked):
            return PrefixMatch(table.keys, (), "")
        match = super().match_prefix(table.keys, max_tokens=table.physical_len)
        pairs = enumerate(zip(match.entries, table.entries, strict=False))
        same = takewhile(lambda each: each[1][0] is each[1][1] and self._is_own(table, each[0]), pairs)
        return replace(match, entries=match.entries[: len(list(same))], lower=())

    def num_to_resume(self, seq_id: int, match: PrefixMatch) -> int:
        """Blocks that it takes beside those of the match, its own next tokens not counted."""
        return len(self._parked[seq_id].held) - len(match.entries)

    def parked(self, seq_id: int) -> Parked:
        """Of a sequence that is parked, or was until this step."""
        found = self._parked.get(seq_id)
        return self._resumed[seq_id] if found is None else found

    def resume(self, seq_id: int, match: PrefixMatch) -> None:
        """Bring a parked sequence back, as it was, in other blocks, with a match made in this step."""
        self._refuse_known(seq_id)
        parked = self._parked.pop(seq_id)
        self._resumed[seq_id] = parked
        table, num_hit = parked.table, len(match.entries)
        self.pool.hit(match.block_ids, table.priority)
        missing = parked.slots[num_hit:]
        blocks = self.pool.allocate(len(missing) - missing.count(None))
        self.counts.resumed_blocks += len(blocks)
        supply = iter(blocks)
        ids = [None if slot is None else next(supply) for slot in missing]
        self._loads += (
            (slot, block)
            for slot, block in zip(missing, ids, strict=True)
            if slot is not None and block is not None
        )
        back = replace(table, block_ids=[*match.block_ids, *ids], version=table.version + 1)
        if table.chain is not None:
            back.chain, back.entries = None, list(match.entries)
            if self._goes_on(parked):
                back.chain = match.entries[-1] if num_hit else self.pool.index.root(table.keys.salt)
                self.prefix.enter_full_blocks(back, num_hit)
                self._note_twins(parked.slots, back)
        self._tables[seq_id] = back
        self._follow(seq_id, back)

    def drop_parked(self, seq_id: int) -> None:
        """A parked sequence has ended, or is to be computed anew."""
        parked = self._parked.pop(seq_id, None)
        if parked is not None:
            self._release_parked(parked)

    def _release_parked(self, parked: Parked) -> None:
        self._num_own -= parked.num_own
        self.host.pool.release(reversed(parked.held))

    def _goes_on(self, parked: Parked) -> bool:
        """Whether its chain's root is still the index's."""
        return parked.root == self.pool.index.root(None).serial

    def grow(self, seq_id: int, num_tokens: int) -> Growth:
        growth = super().grow(seq_id, num_tokens)
        self._copied.update((target, source) for source, target in growth.copies)
        return growth

    def take_outs(self) -> list[Move]:
        """(block, slot) of sequences that were parked."""
        outs, self._outs = self._outs, []
        return outs

    def settle(self) -> None:
        super().settle()
        self._copied.clear()
        for parked in self._resumed.values():
            self._release_parked(parked)
        self._resumed.clear()

    def check(self) -> None:
        super().check()
        own = sum(one.num_own for one in self._all_parked())
        assert own == self._num_own <= self.max_parked, f"{own} slots of parked ones, {self._num_own} counted"
        assert not self._parked.keys() & self._tables.keys(), "a sequence has blocks and is parked"

    def _slots_held(self) -> Counter[int]:
        held = super()._slots_held()
        for one in self._all_parked():
            held.update(one.held)
        return held

    def _all_parked(self) -> list[Parked]:
        return [*self._parked.values(), *self._resumed.values()]
