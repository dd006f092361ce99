"""Spans of a prompt whose tokens the caller drops, as whole blocks of one sequence. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[int, int]
"""Tokens first .. last + 1."""


@dataclass(frozen=True, slots=True)
class Drops:
    """What one request drops, and when.

    spans: ascending, apart from each other, all before `at`
    at:    prompt tokens behind which they have left the cache: no later token sees them
    """

    spans: tuple[Span, ...]
    at: int

    def num_in_blocks(self, block_size: int) -> int:
        """Tokens of the blocks that lie wholly within a span of a sequence whose slots are its positions."""
        return sum(
            max(0, end // block_size - -(-start // block_size)) * block_size for start, end in self.spans
        )


@dataclass(frozen=True, slots=True)
class Drop:
    """What a sequence has dropped. entries: of its table as it was, whose blocks it held; num_tokens: live
    ones before"""

    seq_id: int
    entries: tuple[int, ...]
    num_tokens: int


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same tokens in as few spans as can be, ascending."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif start < end:
            found.append((start, end))
    return tuple(found)


def beyond(spans: Sequence[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """What is left of spans outside of others, both joined. O(both): a prompt may drop thousands."""
    left: list[Span] = []
    place = 0
    for start, end in spans:
        while place < len(others) and others[place][0] < end:
            first, last = others[place]
            if start < first:
                left.append((start, first))
            start = max(start, last)
            if last > end:  # it may reach into the next span
                break
            place += 1
        if start < end:
            left.append((start, end))
    return tuple(left)


def blocks_within(spans: Iterable[Span], first: int, end: int, shift: int, size: int) -> tuple[int, ...]:
    """Blocks that lie wholly within a span, of tokens first .. end - 1; token p is in slot p - shift."""
    found: list[int] = []
    for start, stop in spans:
        low, high = max(start, first) - shift, min(stop, end) - shift
        found += range(-(-low // size), high // size)
    return tuple(found)
