"""Interface of the slots below the pool, for memory manager and scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.prefix.index import BlockKeys
from kvreclaim.memory.prefix_cache import PrefixMatch

Move = tuple[int, int]
"""(from, to): a block and a slot, or a slot and a block."""


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """Record of a parked sequence: its blocks are freed, and their content is in host slots.

    table: the sequence's table; its block ids are no longer valid
    slots: host slots of the table's entries that hold tokens, in order; None is a hole
    num_below: leading slots that are in the host's index; the others were filled for this sequence, or for
           sequences that shared the block and were parked in the same step
    root:  serial of its chain's root, so that a reset of the prefix cache stays in effect
    """

    table: BlockTable
    slots: tuple[int | None, ...]
    num_below: int
    root: int

    @property
    def held(self) -> list[int]:
        """Slots without the holes; other sequences may share them."""
        return [slot for slot in self.slots if slot is not None]

    @property
    def own(self) -> list[int]:
        """Slots that only parked sequences hold."""
        return [slot for slot in self.slots[self.num_below :] if slot is not None]


class ParkingSlots:
    """Slots for preempted sequences. These methods park none."""

    def is_parked(self, seq_id: int) -> bool:
        return False

    def num_to_park(self, seq_ids: Iterable[int]) -> int:
        """Return the slots needed to park these sequences: their blocks that no slot holds yet."""
        raise AssertionError("nothing can be parked without slots")

    def can_park(self, seq_ids: Sequence[int]) -> bool:
        """Return whether there are slots to park all of these, one after the other."""
        return False

    def park(self, seq_id: int) -> bool:
        """Free a sequence's blocks and keep their content. Returns: False, with nothing changed, if slots are
        missing."""
        return False

    def park_idle(self, seq_id: int) -> bool:
        """Park a sequence that never runs. Its recurrent state, if it has one, takes a slot of the host's
        states (`state_slot`)."""
        return False

    def state_slot(self, seq_id: int) -> int:
        """Return the host slot of the state of a sequence parked by park_idle, or resumed in this step."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def enter_parked(self, seq_id: int, table: BlockTable) -> tuple[int | None, ...] | None:
        """Park an inexact sequence from elsewhere that never runs.

        Returns: its slots, to be filled; None: too few
        """
        return None

    def parked(self, seq_id: int) -> Parked:
        """Return the record of a sequence that is parked, or was until this step."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def match_parked(self, seq_id: int) -> PrefixMatch:
        """Match the blocks of a parked sequence that the pool still has, bit for bit."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def num_to_resume(self, seq_id: int, match: PrefixMatch, others: Sequence[int] = ()) -> int:
        """Return the blocks needed to resume, besides the match, with `others` that share its full blocks."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def num_coming(self, seq_id: int, match: PrefixMatch) -> int:
        """Return the blocks shared with others that resume in this step, besides the match."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def resume(self, seq_id: int, match: PrefixMatch) -> None:
        """Resume a parked sequence unchanged in new blocks, with a match made in this step."""
        raise AssertionError(f"sequence {seq_id} is not parked")

    def drop_parked(self, seq_id: int) -> None:
        """Drop a sequence that may be parked, because it has ended or will be recomputed."""

    def pop_moves_out(self) -> list[Move]:
        """Return (block, slot) of sequences that were parked since the last call."""
        return []


class OffloadSlots:
    """Slots below the pool. These methods do nothing, as if there were none.

    num_slots: slots on the host; 0: callers of every step and request skip these methods
    parking:   slots of preempted sequences
    """

    num_slots = 0
    parking = ParkingSlots()

    def __init__(self, full: FullAttentionGroup | None = None, states: RecurrentGroup | None = None) -> None:
        """full: the group whose blocks are offloaded; states: of recurrent layers, parked with them"""

    @property
    def index_version(self) -> int:
        """Counter that increases whenever with_lower may have changed."""
        return 0

    # Called by the memory manager.

    def with_lower(self, match: PrefixMatch, whole: PrefixMatch, max_tokens: int | None) -> PrefixMatch:
        """Extend the match by slots that hold the next blocks. whole: the pool's match in full attention,
        also if the other groups lack blocks. Changes nothing."""
        return match

    def admitted(self, seq_id: int, table: BlockTable, match: PrefixMatch) -> None:
        """Load the slots of a match; the sequence has begun with the match's blocks in the pool."""

    def forked(self, parent_id: int, child_id: int) -> None: ...

    def copied(self, copies: Sequence[Move]) -> None:
        """Note that tokens of these sources are copied to these targets in this step."""

    def committed(self, seq_id: int, table: BlockTable) -> None:
        """Note that a sequence's lengths have advanced."""

    def freed(self, seq_id: int) -> None: ...

    def invalidated(self, seq_id: int, table: BlockTable) -> None:
        """Forget a sequence's blocks, which may hold wrong numbers."""

    def reset(self, *, external: bool) -> None:
        """Follow a reset of the pool's prefix cache. external: also forget the prefixes below."""

    def release_copy_sources(self) -> None:
        """Release the sources of the step's finished copies and loads."""

    def check(self) -> None:
        """Check that slots and sequences agree. Raises: AssertionError."""

    # Called by the scheduler.

    def num_below(self, seq_id: int) -> int:
        """Return the leading blocks of a running sequence that the host holds under their prefix."""
        return 0

    def extend(self, seq_id: int, max_tokens: int) -> int:
        """Extend a prompt by blocks that have arrived on the host. Returns: tokens not to compute."""
        return 0

    def prefetch(self, seq_id: int, keys: BlockKeys, max_tokens: int) -> None:
        """Start loading blocks of a waiting sequence that are only on disk."""

    def must_wait(self, seq_id: int) -> bool:
        """Return whether a waiting sequence must wait for a load."""
        return False

    def end_loading(self, seq_id: int) -> None:
        """End the loads of a sequence that has begun, or will not begin."""

    def pop_moves_in(self) -> list[Move]:
        """Return (slot, block) pairs to move before anything is computed."""
        return []

    def pop_stores(self) -> list[Move]:
        """Return (block, slot) pairs to move after the step's commits."""
        return []

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Forget slots that could not be written, so that no lookup finds them."""

    def stored(self) -> None:
        """Note that all slots of pop_stores are filled or forgotten."""
