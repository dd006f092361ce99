"""Recurrent layers (Mamba, linear attention, short convolutions): one state for each sequence.

A state has the same size at every length, and lies in a slot. A step never writes the slot that it reads:
each sequence gets another one, which replaces the old one at commit. So a failed step changes nothing, forks
share a slot until they continue, and a kept slot is a checkpoint at no cost.

A prefix hit must end at a checkpoint. These are kept behind full blocks: at the end of a prompt, where two
prompts were seen to part, at the end of an answer, and every `interval` tokens of a prompt if that is set
(as in SGLang's MambaRadixCache; vLLM keeps one for each aligned step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.group import GroupManager
from kvreclaim.memory.groups.state_slots import StateCounts, StateSizes, StateSlots
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import STATE, Entry
from kvreclaim.memory.prefix_cache import PrefixMatch


@dataclass(slots=True, eq=False)
class HeldState:
    """A sequence's state, and the slots that its next step writes.

    end:     length of its prompt
    slot:    its state; None: it has computed nothing
    pending: slots that its next step writes: the first behind its known tokens, then one behind each draft
    num_known: tokens of that step that are no drafts
    stops:   lengths at which a step must end, for a checkpoint there
    rolling: block of the checkpoint in its answer, which the next one replaces
    """

    end: int = 0
    slot: int | None = None
    pending: list[int] | None = None
    num_known: int = 0
    stops: tuple[int, ...] = ()
    rolling: Entry | None = None

    @property
    def held(self) -> list[int]:
        """Return the slots that a sequence references."""
        return [*(self.pending or ()), *([] if self.slot is None else [self.slot])]


class RecurrentGroup(GroupManager):
    """The states of all recurrent layers together. Takes no blocks, so it never lacks any; its slots suffice
    for as many sequences as may run."""

    miss = STATE

    def __init__(self, pool: BlockPool, block_size: int, held: Counter[int], sizes: StateSizes) -> None:
        super().__init__(pool, block_size, held)
        self.sizes = sizes
        self.slots = StateSlots[Entry](sizes.num_slots, sizes.num_checkpoints, pool.index.is_live)
        self._of: dict[int, HeldState] = {}
        self._targets: dict[int, int] = {}
        """Companions, which have no state of their own, to the sequences that have theirs."""
        self._away: dict[int, HeldState] = {}
        """Parked sequences, without their slots."""
        self._leaving: dict[int, int] = {}
        """The slots of sequences that were parked in this step, until their states are saved."""
        self._coming: set[int] = set()
        """Sequences that have come back in this step, until their states are loaded."""

    @property
    def version(self) -> int:
        """Counter that increases whenever fit may have changed."""
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
        """Slots by use, now."""
        return self.slots.counts

    def _held_by(self, seq_id: int) -> HeldState:
        return self._of[self._targets.get(seq_id, seq_id)]

    def slot(self, seq_id: int) -> int | None:
        """The slot of a sequence's state, a companion's being its target's; None: it has computed nothing."""
        return self._held_by(seq_id).slot

    def pending(self, seq_id: int) -> list[int]:
        """Return the slots that its next step writes; of a companion, those lent to its target."""
        found = self._held_by(seq_id).pending
        assert found is not None, f"sequence {seq_id} computes nothing in this step"
        return found

    def _take(self) -> int:
        """Take a slot with one reference; checkpoints are evicted if none is free."""
        while not self.slots.num_free:
            self.slots.drop_oldest()
        slot = self.slots.take()
        assert slot is not None, "one is free"
        return slot

    def _drop_pending(self, held: HeldState) -> None:
        self.slots.release(*(held.pending or ()))
        held.pending = None

    # Companions.

    def follow(self, seq_id: int, target_id: int) -> None:
        """Let a companion go on from its target's state, without one of its own."""
        self._forget(seq_id)
        self._targets[seq_id] = target_id

    def spare(self, num_drafting: int, num_running: int, num_waiting: int) -> int:
        """Slots for drafts of num_drafting of the running sequences, if num_waiting others may begin."""
        each = self.sizes.each
        left = self.slots.num_free - num_running * (each - 1) - num_waiting * each
        return max(0, left + num_drafting * self.sizes.num_drafts)

    def lend(self, seq_id: int, count: int) -> None:
        """Let a sequence write `count` spare slots before its next step; 0: they come back."""
        held = self._of[seq_id]
        self._drop_pending(held)
        if count:
            self._grow(held, count, count - 1)

    # Checkpoints.

    def fit(self, entries: Sequence[Entry], most: int) -> int:
        return next((n for n in range(most, 0, -1) if entries[n - 1] in self.slots), 0)

    def stops(self, seq_id: int) -> tuple[int, ...]:
        """Lengths at which its steps must end."""
        return () if seq_id in self._targets else self._of[seq_id].stops

    def keep_at(self, seq_id: int, *lengths: int) -> None:
        """Also keep its states at these lengths, which are whole blocks, for others to begin with."""
        held = self._of[seq_id]
        held.stops = tuple(sorted({*held.stops, *lengths}))

    def checkpoint(self, entry: Entry) -> int | None:
        """Return the slot of the state that is kept after this block."""
        return self.slots.find(entry)

    def is_rolling(self, seq_id: int, entry: Entry) -> bool:
        """Return whether the sequence's next checkpoint replaces this one."""
        return seq_id not in self._targets and self._of[seq_id].rolling is entry

    def keep_begun(self, seq_id: int, table: BlockTable) -> None:
        """Keep the state that a sequence has begun with."""
        slot = self._of[seq_id].slot
        if slot is not None and len(table.entries) * self.block_size == table.logical_len:
            self.slots.keep(table.entries[-1], self.slots.share(slot))

    # Sequences.

    def begin(self, seq_id: int, match: PrefixMatch, priority: int) -> None:
        held = self._of[seq_id] = HeldState(match.keys.num_tokens)
        self.drop_parked(seq_id)
        if match.state is not None:
            held.slot = self._take()
        elif match.entries:
            held.slot = self.slots.share(self.slots.use(match.entries[-1]))
        size, interval = self.block_size, self.sizes.interval
        if self.sizes.num_checkpoints:
            ends = {(held.end - 1) // size * size, match.num_indexed * size}
            ends.update(range(interval, held.end, interval) if interval else ())
            held.stops = tuple(sorted(end for end in ends if end > match.num_tokens))

    def fork(self, parent_id: int, child_id: int, child: BlockTable) -> None:
        if parent_id in self._targets:
            self._targets[child_id] = self._targets[parent_id]
            return
        parent = self._of[parent_id]
        slot = None if parent.slot is None else self.slots.share(parent.slot)
        self._of[child_id] = HeldState(parent.end, slot)

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
        if seq_id in self._targets:
            return
        held = self._of.get(seq_id)
        if held is None:
            held = self._of[seq_id] = HeldState(table.keys.num_tokens)
        self._grow(held, num_tokens - num_drafts, num_drafts)

    def _grow(self, held: HeldState, num_known: int, num_drafts: int) -> None:
        self._drop_pending(held)
        held.pending, held.num_known = [self._take() for _ in range(1 + num_drafts)], num_known

    def commit(self, seq_id: int, table: BlockTable, num_tokens: int) -> None:
        """Replace the sequence's state by the state after these tokens."""
        if seq_id in self._targets:
            return
        held = self._of[seq_id]
        assert held.pending is not None, "a sequence was committed and has no state to replace its own"
        chosen = held.pending.pop(max(0, num_tokens - held.num_known))
        self._release(held)
        held.slot = chosen
        full, rest = divmod(table.logical_len, self.block_size)
        if rest or table.chain is None or len(table.entries) != full:
            return
        entry = table.entries[-1]
        if table.logical_len in held.stops:
            self.slots.keep(entry, self.slots.share(chosen))
        elif table.logical_len >= held.end:
            self.slots.drop(held.rolling)
            held.rolling = entry if self.slots.keep(entry, self.slots.share(chosen)) else None

    def free(self, seq_id: int, table: BlockTable) -> int:
        self._forget(seq_id)
        self._coming.discard(seq_id)
        return 0

    def _forget(self, seq_id: int) -> None:
        self._targets.pop(seq_id, None)
        if (held := self._of.pop(seq_id, None)) is not None:
            self._release(held)

    def _release(self, held: HeldState) -> None:
        """Release a sequence's slots."""
        self.slots.release(*held.held)
        held.pending = held.slot = None

    # Parked sequences: planned here, and their bytes moved before the step writes anything.

    def park(self, seq_id: int) -> None:
        """Give a sequence's slot back once its state is saved (`leaving`, `saved`). One that has come back in
        this step is saved still."""
        held = self._away[seq_id] = self._of.pop(seq_id)
        self._drop_pending(held)
        assert held.slot is not None, f"sequence {seq_id} is parked and has computed nothing"
        if seq_id in self._coming:
            self._coming.remove(seq_id)
            self.slots.release(held.slot)
        else:
            self._leaving[seq_id] = held.slot
        held.slot = None

    def resume(self, seq_id: int) -> None:
        """Give a parked sequence a slot, to be loaded (`coming`, `loaded`); or its own, if it has left in
        this step."""
        held = self._of[seq_id] = self._away.pop(seq_id)
        held.slot = self._leaving.pop(seq_id, None)
        if held.slot is None:
            held.slot = self._take()
            self._coming.add(seq_id)

    def enter(self, seq_id: int, *, parked: bool) -> None:
        """Add a sequence from elsewhere that never runs: parked, or with a slot to be filled at once."""
        held = HeldState()
        if parked:
            self._away[seq_id] = held
        else:
            held.slot = self._take()
            self._of[seq_id] = held

    def drop_parked(self, seq_id: int) -> None:
        """Forget a sequence that may be parked."""
        self._away.pop(seq_id, None)
        if seq_id in self._leaving:
            self.saved(seq_id)

    def leaving(self, seq_id: int) -> int | None:
        """Return the slot of a state that is to be saved."""
        return self._leaving.get(seq_id)

    def saved(self, seq_id: int) -> None:
        """Record that the state has been saved."""
        self.slots.release(self._leaving.pop(seq_id))

    def coming(self, seq_id: int) -> int | None:
        """Return the slot that a state is to be loaded into."""
        return self._of[seq_id].slot if seq_id in self._coming else None

    def loaded(self, seq_id: int) -> None:
        """Record that the state has been loaded."""
        self._coming.remove(seq_id)

    def blocks(self, seq_id: int, table: BlockTable) -> list[int]:
        return []

    def num_blocks(self, seq_id: int, table: BlockTable) -> int:
        return 0

    def check(self, seq_id: int, table: BlockTable) -> None:
        if seq_id not in self._targets:
            slot = self._of[seq_id].slot
            assert (slot is None) == (table.logical_len == 0), f"{table.logical_len} tokens: {slot}"

    def check_slots(self) -> None:
        """Check references against sequences and checkpoints. Raises: AssertionError."""
        held = (slot for held in self._of.values() for slot in held.held)
        self.slots.check([*self._leaving.values(), *held])
