"""Conversion of tokens to blocks, and the byte of marks that the pool keeps for each block."""

from __future__ import annotations

from typing import Final


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for num_tokens; 0 for no or negative tokens."""
    return max(0, -(-num_tokens // block_size))


# Marks; a reader may map them as an array.
INDEXED: Final = 1
"""A prefix hit can find the block."""
PINNED: Final = 2
"""A pin holds, so the block is indexed, too."""
WINDOW: Final = 4
"""A hit finds the block as a part of a window, under the entry of another block."""
CACHED: Final = INDEXED | WINDOW
