"""Flags of a block in one byte; a reader may map the pool's marks as an array."""

from __future__ import annotations

from typing import Final

INDEXED: Final = 1
"""A prefix hit can find the block."""
PINNED: Final = 2
"""A pin holds, so the block is indexed, too."""
SAMPLED: Final = 4
"""The block's residency is being measured."""
WINDOW: Final = 8
"""A hit finds the block as a part of a window, under the entry of another block."""
CACHED: Final = INDEXED | WINDOW
