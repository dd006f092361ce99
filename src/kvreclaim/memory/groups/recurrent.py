"""Recurrent layers (Mamba, linear attention, short convolutions): one state for each sequence.

A state has the same size whatever the length, and lies in a slot. A step never writes the slot that it reads:
each sequence gets another one, which takes the old one's place when the step is committed. So a failed step
changes nothing, forks share a slot until they go on, and a slot that is kept is a checkpoint at no cost.

A prefix hit must end at a checkpoint. These are kept behind full blocks: at the end of a prompt, where two
prompts were seen to part, at the end of an answer, and every `interval` tokens of a prompt if that is set.
The least recently used ones give way (as in SGLang's MambaRadixCache; vLLM keeps one for each aligned step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.group import GroupManager
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import STATE, Entry
from kvreclaim.memory.prefix_cache import PrefixMatch


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Sizes of a recurrent group.

    num_slots:       in all: `each` for each running sequence, and the checkpoints
    num_checkpoints: slots kept for prefix hits at most
    interval:        tokens of a prompt between checkpoints; 0: none between
    each:            two at least; num_drafts: of these, for drafts
    """

    num_slots: int
    num_checkpoints: int = 0
    interval: int = 0
    each: int = 2
    num_drafts: int = 0

    @classmethod
    def of(
        cls,
        max_num_seqs: int,
        each: int = 2,
        checkpoints: int | None = None,
        interval: int = 0,
        num_drafts: int = 0,
    ) -> StateSlots:
        """each: slots of a running sequence; checkpoints: None: as many as sequences"""
        kept = max_num_seqs if checkpoints is None else checkpoints
        return cls(each * max_num_seqs + kept, kept, interval, each, num_drafts)


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Slots that sequences hold, that only prefix hits can use, and free ones; checkpoints: that prefix hits
    can use, whoever holds them, too."""

    in_use: int = 0
    cached: int = 0
    free: int = 0
    checkpoints: int = 0

    @property
    def slots(self) -> dict[str, int]:
        """Slots by state."""
        return {"in_use": self.in_use, "cached": self.cached, "free": self.free}


NO_STATES = StateCounts()


def most_sequences(room: int, each: int = 2, checkpoints: int | None = None) -> int:
    """How many sequences can run where there is room for so many slots; arguments as of StateSlots.of."""
    return room // (each + 1) if checkpoints is None else max(0, room - checkpoints) // each


@dataclass(slots=True, eq=False)
class _Held:
    """What one sequence has.

    slot:    its state; None: it has computed nothing
    pending: slots that its next step writes: the first behind its known tokens, then one behind each draft
    num_known: tokens of that step that are no drafts
    stops:   lengths at which a step must end, for a checkpoint there
    end:     length of its prompt
    rolling: serial of the checkpoint in its answer, which the next one replaces
    """

    slot: int | None = None
    pending: list[int] | None = None
    num_known: int = 0
    stops: tuple[int, ...] = ()
    end: int = 0
    rolling: int | None = None


class RecurrentGroup(GroupManager):
    """The states of all recurrent layers together. Takes no blocks, so it never lacks any; its slots suffice
    for as many sequences as may run."""

    miss = STATE

    def __init__(self, pool: BlockPool, block_size: int, held: Counter[int], sizes: StateSlots) -> None:
        super().__init__(pool, block_size, held)
        self.sizes = sizes
        self.version = 0
        """Grows whenever an answer of fit may have changed."""
        self._free = list(range(sizes.num_slots))[::-1]
        self._refs = [0] * sizes.num_slots
        self._checkpoints: dict[int, tuple[Entry, int]] = {}
        self._of: dict[int, _Held] = {}
        self._away: dict[int, _Held] = {}
        """Parked sequences, without their slots."""
        self._leaving: dict[int, int] = {}
        """The slots of sequences that were parked in this step, until their states are saved."""
        self._coming: set[int] = set()
        """Sequences that have come back in this step, until their states are loaded."""
        self._targets: dict[int, int] = {}
        """Companions, which have no states of their own, and their targets."""

    # Slots.

    def _take(self) -> int:
        while not self._free:
            assert self._checkpoints, f"all {self.sizes.num_slots} state slots are in use"
            self._drop(next(iter(self._checkpoints)))
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def _release(self, slot: int) -> None:
        self._refs[slot] -= 1
        if not self._refs[slot]:
            self._free.append(slot)

    @property
    def num_used(self) -> int:
        """Slots of sequences and checkpoints."""
        return self.sizes.num_slots - len(self._free)

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def counts(self) -> StateCounts:
        """Slots by what holds them, now."""
        cached = sum(self._refs[slot] == 1 for _, slot in self._checkpoints.values())
        free = len(self._free)
        return StateCounts(self.sizes.num_slots - free - cached, cached, free, len(self._checkpoints))

    def slot(self, seq_id: int) -> int | None:
        """The slot of a sequence's state; None: it has computed nothing. Of a companion, its target's."""
        return self._of[self._targets.get(seq_id, seq_id)].slot

    def pending(self, seq_id: int) -> list[int]:
        """The slots that its next step writes. Of a companion, those lent to its target."""
        found = self._of[self._targets.get(seq_id, seq_id)].pending
        assert found is not None, f"sequence {seq_id} computes nothing in this step"
        return found

    # Companions.

    def follow(self, seq_id: int, target_id: int) -> None:
        """A companion has no state of its own from now on: it goes on from its target's."""
        self._forget(seq_id)
        self._targets[seq_id] = target_id

    def spare(self, num_drafting: int, num_running: int, num_waiting: int) -> int:
        """Slots for the drafts of so many of the running sequences, where so many may begin beside them."""
        each = self.sizes.each
        left = len(self._free) - num_running * (each - 1) - num_waiting * each
        return max(0, left + num_drafting * self.sizes.num_drafts)

    def lend(self, seq_id: int, count: int) -> None:
        """Let a sequence write so many spare slots before its next step; none: they come back."""
        held = self._of[seq_id]
        self._forget_pending(held)
        if count:
            held.pending, held.num_known = [self._take() for _ in range(count)], count

    # Checkpoints.

    def fit(self, entries: Sequence[Entry], most: int) -> int:
        return next((n for n in range(most, 0, -1) if entries[n - 1].serial in self._checkpoints), 0)

    def stops(self, seq_id: int) -> tuple[int, ...]:
        """Lengths at which its steps must end."""
        return self._of[seq_id].stops

    def keep_at(self, seq_id: int, *lengths: int) -> None:
        """Keep its states at these lengths, too, which are whole blocks: others go on from there."""
        held = self._of[seq_id]
        held.stops = tuple(sorted({*held.stops, *lengths}))

    def checkpoint(self, entry: Entry) -> int | None:
        """The slot of the state that is kept behind this block."""
        found = self._checkpoints.get(entry.serial)
        return None if found is None else found[1]

    def is_rolling(self, seq_id: int, entry: Entry) -> bool:
        """Whether the sequence's next checkpoint takes the place of this one."""
        held = self._of.get(seq_id)  # a companion has none
        return held is not None and held.rolling == entry.serial

    def keep_begun(self, seq_id: int, table: BlockTable) -> None:
        """Keep the state that a sequence has begun with."""
        slot = self._of[seq_id].slot
        if slot is not None and len(table.entries) * self.block_size == table.logical_len:
            self._keep(table.entries[-1], slot)

    def _keep(self, entry: Entry, slot: int) -> None:
        if entry.serial in self._checkpoints or not self.sizes.num_checkpoints:
            return
        if len(self._checkpoints) >= self.sizes.num_checkpoints:
            gone = (
                serial for serial, (old, _) in self._checkpoints.items() if not self.pool.index.is_live(old)
            )
            self._drop(next(gone, next(iter(self._checkpoints))))
        self._checkpoints[entry.serial] = entry, slot
        self._refs[slot] += 1
        self.version += 1

    def _drop(self, serial: int) -> None:
        _, slot = self._checkpoints.pop(serial)
        self._release(slot)
        self.version += 1

    # Sequences.

    def begin(self, seq_id: int, match: PrefixMatch, priority: int) -> None:
        held = self._of[seq_id] = _Held(end=match.keys.num_tokens)
        self.drop_parked(seq_id)
        if match.state is not None:
            held.slot = self._take()
        elif match.entries:
            serial = match.entries[-1].serial
            self._checkpoints[serial] = _, held.slot = self._checkpoints.pop(serial)  # behind the others
            self._refs[held.slot] += 1
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
        self._of[child_id] = _Held(parent.slot, end=parent.end)
        if parent.slot is not None:
            self._refs[parent.slot] += 1

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
        held = self._of.setdefault(seq_id, _Held(end=table.keys.num_tokens))
        self._forget_pending(held)
        held.pending, held.num_known = [self._take() for _ in range(1 + num_drafts)], num_tokens - num_drafts

    def _forget_pending(self, held: _Held) -> None:
        for slot in held.pending or ():
            self._release(slot)
        held.pending = None

    def commit(self, seq_id: int, table: BlockTable, num_tokens: int) -> None:
        if seq_id in self._targets:
            return
        held = self._of[seq_id]
        assert held.pending is not None, (
            f"sequence {seq_id} was committed and has no state to replace its own"
        )
        chosen = held.pending.pop(max(0, num_tokens - held.num_known))
        self._forget_pending(held)
        if held.slot is not None:
            self._release(held.slot)
        held.slot = chosen
        full, rest = divmod(table.logical_len, self.block_size)
        if rest or table.chain is None or len(table.entries) != full:
            return
        entry = table.entries[-1]
        if table.logical_len in held.stops:
            self._keep(entry, chosen)
        elif table.logical_len >= held.end:
            if held.rolling in self._checkpoints:
                self._drop(held.rolling)
            is_new = entry.serial not in self._checkpoints
            self._keep(entry, chosen)
            held.rolling = entry.serial if is_new else None

    def free(self, seq_id: int, table: BlockTable) -> int:
        self._targets.pop(seq_id, None)
        self._forget(seq_id)
        self._coming.discard(seq_id)
        return 0

    def _forget(self, seq_id: int) -> None:
        if (held := self._of.pop(seq_id, None)) is not None:
            self._forget_pending(held)
            if held.slot is not None:
                self._release(held.slot)

    # Parked sequences: planned here, and their bytes moved before the step writes anything.

    def park(self, seq_id: int) -> None:
        """Give a sequence's slot back once its state is saved (`leaving`, `saved`). One that has come back in
        this step is saved still."""
        held = self._away[seq_id] = self._of.pop(seq_id)
        self._forget_pending(held)
        assert held.slot is not None, f"sequence {seq_id} is parked and has computed nothing"
        if seq_id in self._coming:
            self._coming.remove(seq_id)
            self._release(held.slot)
        else:
            self._leaving[seq_id] = held.slot
        held.slot = None

    def resume(self, seq_id: int) -> None:
        """Give a parked sequence a slot, to be loaded (`coming`, `loaded`); or its own, where it has left in
        this step."""
        held = self._of[seq_id] = self._away.pop(seq_id)
        held.slot = self._leaving.pop(seq_id, None)
        if held.slot is None:
            held.slot = self._take()
            self._coming.add(seq_id)

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
        self._release(self._leaving.pop(seq_id))

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
        if seq_id in self._targets:
            return
        held = self._of[seq_id]
        assert (held.slot is None) == (table.logical_len == 0), f"sequence {seq_id}: slot {held.slot}"

    def check_slots(self) -> None:
        """References agree with what holds them. Raises AssertionError."""
        found = Counter([*(slot for _, slot in self._checkpoints.values()), *self._leaving.values()])
        for held in self._of.values():
            found.update([*(held.pending or ()), *([] if held.slot is None else [held.slot])])
        counted = {slot: count for slot, count in enumerate(self._refs) if count}
        assert found == counted, f"state slots {dict(found)}, counted {counted}"
        assert len(self._free) + len(counted) == self.sizes.num_slots, "a state slot is lost"
        assert len(self._checkpoints) <= self.sizes.num_checkpoints, "too many checkpoints"
