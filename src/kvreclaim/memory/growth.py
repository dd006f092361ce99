"""Room for the next slots: what it takes, and the copy of a tail that others share."""

from __future__ import annotations

from collections.abc import Mapping
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


def tail_refs(table: BlockTable, pool: BlockPool, block_size: int, held: Mapping[int, int]) -> int:
    """References of sequences to the begun block that the next slot lies in; 0 if it begins a block.

    held: references to blocks beside those of sequences
    """
    index, used = divmod(table.physical_len, block_size)
    if not used:
        return 0
    block = table.block_ids[index]
    assert block is not None, f"entry {index} is written next and is a hole"
    return pool.refs[block] - held.get(block, 0)


def unshare_tail(table: BlockTable, block_size: int, copy: int) -> tuple[int, int]:
    """Let a fresh block stand for the shared one, whose reference is left to the caller. Returns: (source,
    destination) of the bytes."""
    index = table.physical_len // block_size
    source = table.block_ids[index]
    assert source is not None, f"entry {index} is written next and is a hole"
    table.replace(index, copy)
    return source, copy
