"""Which text calibration has read, so that nothing is measured on it later."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

PIECE = 32
"""Tokens of one digest: text that has been read is found wherever 63 tokens of it stand in a row."""


def read_pieces(documents: Iterable[Sequence[int]]) -> tuple[str, ...]:
    """Digests of the documents, piece by piece; the last piece of each ends with it."""
    return tuple(
        dict.fromkeys(
            _digest(document[start : start + PIECE])
            for document in documents
            for start in (*range(0, len(document) - PIECE, PIECE), max(0, len(document) - PIECE))
        )
    )


def unread(text: Sequence[int], read: Collection[str]) -> list[Sequence[int]]:
    """Stretches of the text between the pieces that have been read, in order. O(tokens)."""
    known = frozenset(read)
    starts = [n for n in range(len(text) - PIECE + 1) if _digest(text[n : n + PIECE]) in known]
    ends = [0, *(start + PIECE for start in starts)]
    return [text[end:start] for end, start in zip(ends, [*starts, len(text)], strict=True) if end < start]


def windows(stretches: Iterable[Sequence[int]], size: int) -> list[Sequence[int]]:
    """Windows of exactly `size` tokens, side by side."""
    return list(
        itertools.chain.from_iterable(
            [stretch[n : n + size] for n in range(0, len(stretch) - size + 1, size)] for stretch in stretches
        )
    )


def _digest(tokens: Sequence[int]) -> str:
    return blake2b(array("q", tokens).tobytes(), digest_size=6).hexdigest()
