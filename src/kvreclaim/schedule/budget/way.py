"""What a policy does to memory."""

from __future__ import annotations

from enum import Enum


class Way(Enum):
    """One of six; whatever depends on how memory changes asks for the way, never for a policy's name."""

    KEEP = "keep"
    """Nothing is evicted."""
    COMPACT = "compact"
    """Every head keeps equally many tokens, which slide together; the other blocks go back."""
    MASK = "mask"
    """Evicted tokens are no longer attended to and nothing moves: no block empties except by chance."""
    BLOCKS = "blocks"
    """Whole blocks go, the same in all layers and heads, and nothing moves."""
    CELLS = "cells"
    """Heads keep unequal numbers of tokens, in whole cells of the sequence's blocks."""
    READS = "reads"
    """Everything is kept, but each decode step reads some blocks only."""

    @property
    def evicts(self) -> bool:
        """Whether there are passes at all."""
        return self not in (Way.KEEP, Way.READS)

    @property
    def reclaims(self) -> bool:
        """Whether what is evicted gives its blocks back."""
        return self in (Way.COMPACT, Way.BLOCKS, Way.CELLS)

    @property
    def moves(self) -> bool:
        """Whether survivors slide together, into blocks that nobody else reads."""
        return self in (Way.COMPACT, Way.CELLS)
