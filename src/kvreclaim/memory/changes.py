"""Changes of one table: requests and results. Plain integers; the caller moves the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Id = TypeVar("Id", int, str)


@dataclass(frozen=True, slots=True)
class Growth:
    """The changes that grow made.

    new_blocks: appended to the table
    copies:     (source, destination) blocks; the caller copies their bytes before it writes
    """

    new_blocks: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


NO_GROWTH = Growth((), ())


@dataclass(frozen=True, slots=True)
class TableState:
    """A sequence's block table, in table order, as input of a compaction plan.

    block_ids:  ids; None is a hole
    ref_counts: references to each block, this sequence's included; a hole has 0
    indexed:    whether each block is in the prefix index; a hole isn't
    """

    block_ids: Sequence[int | None]
    ref_counts: Sequence[int]
    indexed: Sequence[bool]


@dataclass(frozen=True, slots=True)
class CompactionPlan(Generic[Id]):
    """The memory manager's part of moving a sequence's kept tokens into whole private blocks.

    seq_id:     owner of the table
    num_tokens: tokens kept: the new physical length
    targets:    the new table; an id is one of the sequence's own blocks, None a fresh block. They are
                not in general the first blocks of the old table: a mover reads before it writes
    strip:      targets that must leave the prefix index before they are written
    """

    seq_id: Id
    num_tokens: int
    targets: tuple[int | None, ...]
    strip: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Result of a plan.

    block_ids:    the new table
    blocks_freed: blocks that went back to the pool, less the fresh ones; not positive when other
                  sequences still hold what was dropped
    """

    block_ids: tuple[int, ...]
    blocks_freed: int
