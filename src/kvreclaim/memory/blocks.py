"""Tokens counted in blocks."""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that this many tokens begin: none for none or fewer, the last one maybe not full."""
    return max(0, -(-num_tokens // block_size))
