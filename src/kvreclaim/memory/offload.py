"""The interface of the slots below the pool, for memory manager and scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.prefix.keys import BlockKeys
from kvreclaim.memory.prefix_cache import PrefixMatch

Move = tuple[int, int]
"""(from, to): a block and a slot, or a slot and a block."""


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """The record that brings a parked sequence back: it has given up its blocks, not what they held.

    table: of the sequence; its block ids are no longer its own
    slots: host slots of the table's entries that hold tokens, in order; None is a hole
    num_below: of these, leading ones that stand in the host's index; the others were filled for it, or for
           sequences that shared the block and were parked in the same step
    root:  serial of the root that its chain began at, so that a prefix cache that was reset stays so
    """

    table: BlockTable
    slots: tuple[int | None, ...]
    num_below: int
    root: int

    @property
    def held(self) -> list[int]:
        """Its slots, without the holes; they may be other sequences', too."""
        return [slot for slot in self.slots if slot is not None]

    @property
    def own(self) -> list[int]:
        """Slots that only parked sequences have."""
        return [slot for slot in self.slots[self.num_below :] if slot is not None]


class ParkingSlots:
    """Slots for sequences that give their blocks back. These methods park none."""

    def is_parked(self, seq_id: int) -> bool:
        return False

    def num_to_park(self, seq_ids: Iterable[int]) -> int:
        """Slots to fill to park these sequences: blocks that no slot holds yet."""
        raise AssertionError("nothing can be parked without slots")

    def can_park(self, seq_ids: Sequence[int]) -> bool:
        """Return whether there are slots to park all of these, one after the other."""
        return False

    def park(self, seq_id: int) -> bool:
        """Free a sequence's blocks and keep what they hold. Returns: whether there were slots; nothing has
        changed if not."""
        return False

    def park_idle(self, seq_id: int) -> bool:
        """Park a sequence that never runs. Its recurrent state, if it has one, takes a slot of the host's
        states (`state_slot`)."""
        return False

    def state_slot(self, seq_id: int) -> int:
        """The host's slot of the state of a sequence parked by park_idle, or resumed in this step."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def enter_parked(self, seq_id: int, table: BlockTable) -> tuple[int | None, ...] | None:
        """Park an inexact sequence from elsewhere that never runs.

        Returns: its slots, to be filled; None: too few
        """
        return None

    def parked(self, seq_id: int) -> Parked:
        """A sequence that is parked, or was until this step."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def match_parked(self, seq_id: int) -> PrefixMatch:
        """Match what the pool still has of a parked sequence, to the bit."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def num_to_resume(self, seq_id: int, match: PrefixMatch, others: Sequence[int] = ()) -> int:
        """Blocks it takes to come back besides the match, with `others`, which share its full blocks."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def num_coming(self, seq_id: int, match: PrefixMatch) -> int:
        """Blocks it would share with others that come back in this step, besides the match."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def resume(self, seq_id: int, match: PrefixMatch) -> None:
        """Bring a parked sequence back, as it was, in other blocks, with a match made in this step."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def drop_parked(self, seq_id: int) -> None:
        """A sequence that may be parked has ended, or is to be computed again."""

    def pop_swap_outs(self) -> list[Move]:
        """(block, slot) of sequences that were parked since the last call."""
        return []


class OffloadSlots:
    """Slots below the pool. These methods do nothing, as if there were none.

    num_slots: slots on the host
    parking:   where sequences that give way keep what they hold
    """

    num_slots = 0
    parking = ParkingSlots()

    def __init__(self, full: FullAttentionGroup | None = None, states: RecurrentGroup | None = None) -> None:
        """full: the group whose blocks are offloaded; states: of recurrent layers, parked with them"""

    @property
    def index_version(self) -> int:
        """Grows whenever with_lower may have changed."""
        return 0

    # Called by the memory manager.

    def with_lower(self, match: PrefixMatch, whole: PrefixMatch, max_tokens: int | None) -> PrefixMatch:
        """The match with the slots that hold the blocks behind it. whole: what the pool has of full
        attention, also where the other groups lack something. Changes nothing."""
        return match

    def admitted(self, seq_id: int, table: BlockTable, match: PrefixMatch) -> None:
        """A sequence has begun with the pool's blocks of a match: bring the match's slots up."""

    def forked(self, parent_id: int, child_id: int) -> None: ...

    def copied(self, copies: Sequence[Move]) -> None:
        """Tokens of these sources are to be copied to these targets in this step."""

    def committed(self, seq_id: int, table: BlockTable) -> None:
        """A sequence's lengths have advanced."""

    def freed(self, seq_id: int) -> None: ...

    def invalidated(self, seq_id: int, table: BlockTable) -> None:
        """Forget a sequence's blocks, which may hold wrong numbers."""

    def reset(self, *, external: bool) -> None:
        """The pool's prefixes are forgotten; external: those below, too."""

    def release_copy_sources(self) -> None:
        """The step's copies and loads have been made."""

    def check(self) -> None:
        """Raises AssertionError unless slots and sequences agree."""

    # Called by the scheduler.

    def num_below(self, seq_id: int) -> int:
        """Leading blocks of a running sequence that the host holds under their prefix."""
        return 0

    def extend(self, seq_id: int, max_tokens: int) -> int:
        """Let a prompt go on behind blocks that have come to the host. Returns: tokens not to compute."""
        return 0

    def prefetch(self, seq_id: int, keys: BlockKeys, max_tokens: int) -> None:
        """Begin to load blocks that a waiting sequence would hit on disk alone."""

    def must_wait(self, seq_id: int) -> bool:
        """Return whether a waiting sequence goes on waiting for a load."""
        return False

    def end_loading(self, seq_id: int) -> None:
        """A sequence has begun, or will not."""

    def pop_swap_ins(self) -> list[Move]:
        """(slot, block), to be moved before anything is computed."""
        return []

    def pop_stores(self) -> list[Move]:
        """(block, slot), to be moved behind the step's commits."""
        return []

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Forget slots that could not be written: nothing finds them any more."""

    def stored(self) -> None:
        """All slots that pop_stores named are filled or forgotten."""
