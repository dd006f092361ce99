"""Room for the next slots: what it takes, and the copy of a tail that others share."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.pool import BlockPool


@dataclass(frozen=True, slots=True)
class Growth:
    """What grow changed.

    new_blocks: appended to the table
    copies:     (source, destination) blocks whose bytes the caller copies before it writes
    """

    new_blocks: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


NO_GROWTH = Growth((), ())


def tail_is_shared(table: BlockTable, pool: BlockPool, block_size: int) -> bool:
    """Whether the next slot lies in a begun block that others hold too."""
    index, used = divmod(table.physical_len, block_size)
    if not used:
        return False
    block = table.block_ids[index]
    assert block is not None, f"entry {index} is written next and is a hole"
    return pool.refs[block] > 1


def unshare_tail(table: BlockTable, pool: BlockPool, block_size: int, copy: int) -> tuple[int, int]:
    """Let a fresh block stand for the shared one. Returns: (source, destination) of the bytes."""
    index = table.physical_len // block_size
    source = table.block_ids[index]
    assert source is not None, f"entry {index} is written next and is a hole"
    table.replace(index, copy)
    pool.release((source,))
    return source, copy
