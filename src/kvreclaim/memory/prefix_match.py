"""How much of a prompt is there already: the walk down the prefix index, and its confirmation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvreclaim.memory.misses import COLD, INELIGIBLE
from kvreclaim.memory.prefix_index import Entry, Link, PrefixIndex


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Full blocks that hold a prompt's beginning. Valid until blocks are next allocated.

    miss: the reason why the next full block is not among them, which stands for all behind it; says
          nothing if there is none
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    miss: str = field(default=COLD, compare=False)


def find_match(index: PrefixIndex, token_ids: Sequence[int], limit: int, salt: str | None) -> PrefixMatch:
    """The longest run of indexed full blocks that begins these tokens, at most limit of them.

    Hashes one block more than it finds. Changes nothing.
    """
    size = index.block_size
    link: Link = index.root(salt)
    blocks: list[int] = []
    miss = INELIGIBLE
    for start in range(0, limit - size + 1, size):
        tokens = index.pack(token_ids[start : start + size])
        digest = index.digest(link, tokens)
        entry = index.at(digest)
        if entry is None or not index.follows(entry, link, tokens):
            miss = index.why_missing(link, digest, tokens)
            break
        blocks.append(entry.block)
        link = entry
    return PrefixMatch(tuple(blocks), len(blocks) * size, miss)


def matched_entries(
    index: PrefixIndex, match: PrefixMatch, token_ids: Sequence[int], salt: str | None
) -> list[Entry]:
    """The entries of a match's blocks.

    Compares every block with the index once more and raises AssertionError if one holds something
    else by now. Changes nothing.
    """
    size, entries = index.block_size, []
    link: Link = index.root(salt)
    for i, block in enumerate(match.block_ids):
        entry = index.of(block)
        assert entry is not None, f"block {block}, number {i} of the match, is not indexed any more"
        tokens = index.pack(token_ids[i * size : (i + 1) * size])
        assert index.follows(entry, link, tokens), (
            f"block {block}, number {i} of the match, holds other tokens"
        )
        entries.append(entry)
        link = entry
    return entries
