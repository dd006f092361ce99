"""A sequence that has given its blocks back and not what they held."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.memory.block_table import BlockTable


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """What brings it back as it was.

    table: of the sequence; its block ids are no longer its own
    slots: host slots of the table's entries that hold tokens, in order; None is a hole
    num_below: of these, leading ones that stand in the host's index; the others were filled for it, or for
           sequences that shared the block and were parked in the same step
    tail:  the block that the next token would have gone to, if it holds tokens already
    root:  serial of the root that its chain began at, so that a prefix cache that was reset stays so
    """

    table: BlockTable
    slots: tuple[int | None, ...]
    num_below: int
    tail: int | None
    root: int

    @property
    def held(self) -> list[int]:
        """Its slots, without the holes; they may be other sequences', too."""
        return [slot for slot in self.slots if slot is not None]

    @property
    def own(self) -> list[int]:
        """Slots that only parked sequences have."""
        return [slot for slot in self.slots[self.num_below :] if slot is not None]
