"""Dropped spans of a prompt, as whole blocks of one sequence. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[int, int]
"""Tokens first .. last + 1."""


@dataclass(frozen=True, slots=True)
class Drops:
    """Dropped tokens of one request, and when they leave.

    spans: ascending, disjoint, all before `at`
    at:    prompt length after which no token attends to them
    """

    spans: tuple[Span, ...]
    at: int

    def num_in_blocks(self, block_size: int) -> int:
        """Tokens in blocks wholly within a span, for a sequence with slots equal to positions."""
        return sum(
            max(0, end // block_size - -(-start // block_size)) * block_size for start, end in self.spans
        )


@dataclass(frozen=True, slots=True)
class Drop:
    """Result of a drop. entries: dropped entries of the old table; num_tokens: live tokens before"""

    seq_id: int
    entries: tuple[int, ...]
    num_tokens: int


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merge spans: the same tokens in as few spans as possible, ascending."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif start < end:
            found.append((start, end))
    return tuple(found)


def beyond(spans: Sequence[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """Subtract spans, both joined. O(both): a prompt may drop thousands."""
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
    """Return the blocks wholly within a span, of tokens first .. end - 1; token p is in slot p - shift."""
    found: list[int] = []
    for start, stop in spans:
        low, high = max(start, first) - shift, min(stop, end) - shift
        found += range(-(-low // size), high // size)
    return tuple(found)
