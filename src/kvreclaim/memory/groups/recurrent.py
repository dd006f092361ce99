"""Recurrent layers (Mamba, linear attention, short convolutions): one state for each sequence.

A state has the same size whatever the length, and lies in a slot. A step never writes the slot that it reads:
each sequence gets another one, which takes the old one's place when the step is committed. So a failed step
changes nothing, forks share a slot until they go on, and a slot that is kept is a checkpoint at no cost.

A prefix hit must end at a checkpoint. These are kept behind full blocks: at the end of a prompt, where two
prompts were seen to part, at the end of an answer, and every `interval` tokens of a prompt if that is set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.checkpoints import Checkpoints
from kvreclaim.memory.groups.group import GroupManager
from kvreclaim.memory.groups.held_state import FollowedState, HeldState
from kvreclaim.memory.groups.state_slots import StateCounts, StateSlots
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import STATE, Entry
from kvreclaim.memory.prefix_cache import PrefixMatch


class RecurrentGroup(GroupManager):
    """The states of all recurrent layers together. Takes no blocks, so it never lacks any; its slots suffice
    for as many sequences as may run."""

    miss = STATE

    def __init__(self, pool: BlockPool, block_size: int, held: Counter[int], sizes: StateSlots) -> None:
        super().__init__(pool, block_size, held)
        self.sizes = sizes
        self.slots = Checkpoints(sizes, pool.index)
        self._of: dict[int, HeldState] = {}
        self._away: dict[int, HeldState] = {}
        """Parked sequences, without their slots."""
        self._leaving: dict[int, int] = {}
        """The slots of sequences that were parked in this step, until their states are saved."""
        self._coming: set[int] = set()
        """Sequences that have come back in this step, until their states are loaded."""

    @property
    def version(self) -> int:
        """Grows whenever an answer of fit may have changed."""
        return self.slots.version

    @property
    def num_used(self) -> int:
        """Slots of sequences and checkpoints."""
        return self.sizes.num_slots - self.slots.num_free

    @property
    def num_checkpoints(self) -> int:
        return len(self.slots)

    @property
    def counts(self) -> StateCounts:
        """Slots by what holds them, now."""
        return self.slots.counts

    def slot(self, seq_id: int) -> int | None:
        """The slot of a sequence's state; None: it has computed nothing. Of a companion, its target's."""
        return self._of[seq_id].own.slot

    def pending(self, seq_id: int) -> list[int]:
        """The slots that its next step writes. Of a companion, those lent to its target."""
        found = self._of[seq_id].own.pending
        assert found is not None, f"sequence {seq_id} computes nothing in this step"
        return found

    # Companions.

    def follow(self, seq_id: int, target_id: int) -> None:
        """A companion has no state of its own from now on: it goes on from its target's."""
        self._forget(seq_id)
        self._of[seq_id] = FollowedState(self._of, target_id)

    def spare(self, num_drafting: int, num_running: int, num_waiting: int) -> int:
        """Slots for the drafts of so many of the running sequences, where so many may begin beside them."""
        each = self.sizes.each
        left = self.slots.num_free - num_running * (each - 1) - num_waiting * each
        return max(0, left + num_drafting * self.sizes.num_drafts)

    def lend(self, seq_id: int, count: int) -> None:
        """Let a sequence write so many spare slots before its next step; none: they come back."""
        held = self._of[seq_id]
        held.drop_pending()
        if count:
            held.grow(count, count - 1)

    # Checkpoints.

    def fit(self, entries: Sequence[Entry], most: int) -> int:
        return self.slots.fit(entries, most)

    def stops(self, seq_id: int) -> tuple[int, ...]:
        """Lengths at which its steps must end."""
        return self._of[seq_id].stops

    def keep_at(self, seq_id: int, *lengths: int) -> None:
        """Keep its states at these lengths, too, which are whole blocks: others go on from there."""
        held = self._of[seq_id]
        held.stops = tuple(sorted({*held.stops, *lengths}))

    def checkpoint(self, entry: Entry) -> int | None:
        """The slot of the state that is kept behind this block."""
        return self.slots.find(entry)

    def is_rolling(self, seq_id: int, entry: Entry) -> bool:
        """Whether the sequence's next checkpoint takes the place of this one."""
        return self._of[seq_id].rolling == entry.serial

    def keep_begun(self, seq_id: int, table: BlockTable) -> None:
        """Keep the state that a sequence has begun with."""
        slot = self._of[seq_id].slot
        if slot is not None and len(table.entries) * self.block_size == table.logical_len:
            self.slots.keep(table.entries[-1], slot)

    # Sequences.

    def begin(self, seq_id: int, match: PrefixMatch, priority: int) -> None:
        held = self._of[seq_id] = HeldState(self.slots, match.keys.num_tokens)
        self.drop_parked(seq_id)
        if match.state is not None:
            held.slot = self.slots.take()
        elif match.entries:
            held.slot = self.slots.hit(match.entries[-1])
        size, interval = self.block_size, self.sizes.interval
        if self.sizes.num_checkpoints:
            ends = {(held.end - 1) // size * size, match.num_indexed * size}
            ends.update(range(interval, held.end, interval) if interval else ())
            held.stops = tuple(sorted(end for end in ends if end > match.num_tokens))

    def fork(self, parent_id: int, child_id: int, child: BlockTable) -> None:
        self._of[child_id] = self._of[parent_id].fork()

    def missing(self, seq_id: int, table: BlockTable, num_tokens: int) -> int:
        return 0

    def grow(
        self,
        seq_id: int,
        table: BlockTable,
        num_tokens: int,
        blocks: list[int],
        copies: list[tuple[int, int]],
        num_drafts: int = 0,
    ) -> None:
        held = self._of.get(seq_id)
        if held is None:
            held = self._of[seq_id] = HeldState(self.slots, table.keys.num_tokens)
        held.grow(num_tokens - num_drafts, num_drafts)

    def commit(self, seq_id: int, table: BlockTable, num_tokens: int) -> None:
        self._of[seq_id].commit(table, num_tokens)

    def free(self, seq_id: int, table: BlockTable) -> int:
        self._forget(seq_id)
        self._coming.discard(seq_id)
        return 0

    def _forget(self, seq_id: int) -> None:
        if (held := self._of.pop(seq_id, None)) is not None:
            held.free()

    # Parked sequences: planned here, and their bytes moved before the step writes anything.

    def park(self, seq_id: int) -> None:
        """Give a sequence's slot back once its state is saved (`leaving`, `saved`). One that has come back in
        this step is saved still."""
        held = self._away[seq_id] = self._of.pop(seq_id)
        held.drop_pending()
        assert held.slot is not None, f"sequence {seq_id} is parked and has computed nothing"
        if seq_id in self._coming:
            self._coming.remove(seq_id)
            self.slots.release(held.slot)
        else:
            self._leaving[seq_id] = held.slot
        held.slot = None

    def resume(self, seq_id: int) -> None:
        """Give a parked sequence a slot, to be loaded (`coming`, `loaded`); or its own, where it has left in
        this step."""
        held = self._of[seq_id] = self._away.pop(seq_id)
        held.slot = self._leaving.pop(seq_id, None)
        if held.slot is None:
            held.slot = self.slots.take()
            self._coming.add(seq_id)

    def enter(self, seq_id: int, *, parked: bool) -> None:
        """A sequence that comes from elsewhere, and never runs: it has a slot, to be filled at once, or is
        parked."""
        held = HeldState(self.slots)
        if parked:
            self._away[seq_id] = held
        else:
            held.slot = self.slots.take()
            self._of[seq_id] = held

    def drop_parked(self, seq_id: int) -> None:
        """Forget a sequence that may be parked."""
        self._away.pop(seq_id, None)
        if seq_id in self._leaving:
            self.saved(seq_id)

    def leaving(self, seq_id: int) -> int | None:
        """The slot of a state that is to be saved."""
        return self._leaving.get(seq_id)

    def saved(self, seq_id: int) -> None:
        """Its state has been saved."""
        self.slots.release(self._leaving.pop(seq_id))

    def coming(self, seq_id: int) -> int | None:
        """The slot that a state is to be loaded into."""
        return self._of[seq_id].slot if seq_id in self._coming else None

    def loaded(self, seq_id: int) -> None:
        """Its state has been loaded."""
        self._coming.remove(seq_id)

    def blocks(self, seq_id: int, table: BlockTable) -> list[int]:
        return []

    def num_blocks(self, seq_id: int, table: BlockTable) -> int:
        return 0

    def check(self, seq_id: int, table: BlockTable) -> None:
        self._of[seq_id].check(table)

    def check_slots(self) -> None:
        """References agree with what holds them. Raises AssertionError."""
        self.slots.check(
            [*self._leaving.values(), *(slot for held in self._of.values() for slot in held.held)]
        )
