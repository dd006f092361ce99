"""Drafts from a sequence's own tokens: the tokens that followed an earlier occurrence of its last ones."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np


class Seen:
    """Tokens of one sequence as a growing array. A lookup scans 4 bytes per token."""

    def __init__(self) -> None:
        self._held = np.empty(256, dtype=np.int32)
        self._length = 0

    def grown(self, tokens: ListLike[int]) -> np.ndarray:
        """Append the new tokens. Returns: [len(tokens)] int32, a view that is valid until the next call."""
        start, end = self._length, len(tokens)
        if end > len(self._held):
            held = np.empty(2 * end, dtype=np.int32)
            held[:start] = self._held[:start]
            self._held = held
        self._held[start:end] = tokens[start:end]
        self._length = end
        return self._held[:end]


def propose(tokens: np.ndarray, least: int, most: int, num_tokens: int) -> list[int]:
    """Return the tokens that followed an earlier occurrence of the longest suffix of `tokens`, of at least
    `least` and at most `most` tokens. The latest occurrence is used. The continuation may overlap the
    proposal, so a loop is continued for any number of turns.

    tokens: [n] int32

    Returns: num_tokens, or none. A function of the tokens alone.
    """
    last = len(tokens) - 1
    places = np.flatnonzero(tokens[:last] == tokens[last]) if last >= 0 else np.empty(0, dtype=np.int64)
    length = 1
    while length < most and len(places):
        longer = places[places >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    if not len(places) or length < least:
        return []
    follow = tokens[places[-1] + 1 :]
    return np.resize(follow, num_tokens).tolist()
