"""What a change of one table asks for, and what it gives. Plain integers: the caller moves the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Growth:
    """What grow changed.

    new_blocks: appended to the table
    copies:     (source, destination) blocks whose bytes the caller copies before it writes
    """

    new_blocks: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


NO_GROWTH = Growth((), ())


class ShrinkPlan(Protocol):
    """The new table of one sequence. Plain integers; whoever moves the bytes knows the rest."""

    @property
    def seq_id(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Slots in use afterwards (physical length)."""

    @property
    def targets(self) -> tuple[int | None, ...]:
        """The new table: a writable block of the sequence, or None for a fresh one."""

    @property
    def strip(self) -> tuple[int, ...]:
        """Targets whose index entry must go first, so that nobody hits what is being overwritten."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A shrink that happened.

    block_ids:    the new table
    fresh:        the blocks that replaced the plan's None, in order
    blocks_freed: blocks that went back to the pool, less the fresh ones; not positive when other
                  sequences still hold what was dropped
    """

    block_ids: tuple[int, ...]
    fresh: tuple[int, ...]
    blocks_freed: int
