"""How much of a prompt is there already: the walk down the prefix index, and its confirmation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvreclaim.memory.prefix_index import Link, PrefixIndex


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Full blocks that hold a prompt's beginning. Valid until blocks are next allocated."""

    block_ids: tuple[int, ...]
    num_tokens: int


NO_MATCH = PrefixMatch((), 0)


def find_match(index: PrefixIndex, token_ids: Sequence[int], limit: int, salt: str | None) -> PrefixMatch:
    """The longest run of indexed full blocks that begins these tokens, at most limit of them.

    Hashes one block more than it finds. Changes nothing.
    """
    size = index.block_size
    if limit < size or not len(index):
        return NO_MATCH
    link, blocks = index.root(salt), []
    for start in range(0, limit - size + 1, size):
        entry = index.find(link, index.pack(token_ids[start : start + size]))
        if entry is None:
            break
        blocks.append(entry.block)
        link = entry
    return PrefixMatch(tuple(blocks), len(blocks) * size)


def chain_after(index: PrefixIndex, match: PrefixMatch, token_ids: Sequence[int], salt: str | None) -> Link:
    """Where hashing goes on after a match.

    Compares every block with the index once more and raises AssertionError if one holds something
    else by now. Changes nothing.
    """
    size, link = index.block_size, index.root(salt)
    for i, block in enumerate(match.block_ids):
        entry = index.of(block)
        assert entry is not None, f"block {block}, number {i} of the match, is not indexed any more"
        tokens = index.pack(token_ids[i * size : (i + 1) * size])
        assert index.follows(entry, link, tokens), (
            f"block {block}, number {i} of the match, holds other tokens"
        )
        link = entry
    return link
