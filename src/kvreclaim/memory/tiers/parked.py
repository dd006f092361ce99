"""A sequence that has given its blocks back and not what they held."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.memory.block_table import BlockTable


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """What brings it back as it was.

    table: of the sequence; its block ids are no longer its own
    slots: host slots of the table's entries that hold tokens, in order; None is a hole
    num_own: slots that were filled for it alone, the others stand in the host's index
    tail:  the block that the next token would have gone to, if it holds tokens already
    root:  serial of the root that its chain began at, so that a prefix cache that was reset stays so
    """

    table: BlockTable
    slots: tuple[int | None, ...]
    num_own: int
    tail: int | None
    root: int

    @property
    def held(self) -> list[int]:
        """Its slots, without the holes; a slot of the host's index may be other sequences', too."""
        return [slot for slot in self.slots if slot is not None]
