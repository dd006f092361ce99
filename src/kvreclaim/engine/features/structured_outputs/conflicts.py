"""Search for an output that both a request's options and its grammar allow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import llguidance
import numpy as np

from kvreclaim.sampling_params import SamplingParams

MAX_STATES = 256
"""Grammar states that the search visits; if it finds no contradiction by then, an output may exist."""
MAX_BRANCHES = 64
"""Tokens that may follow a state. More of them are free text, which is not searched."""
MAX_TOKENS = 1024
"""Tokens that may follow a state where white space is among them."""


@dataclass(frozen=True, slots=True)
class Barred:
    """Tokens that an output may not have. early: among its first num_early tokens"""

    always: frozenset[int]
    early: frozenset[int]
    num_early: int
    allowed: frozenset[int] | None

    @staticmethod
    def of(params: SamplingParams, bad_words: Collection[tuple[int, ...]]) -> Barred | None:
        """Return the barred tokens, or None. bad_words: token ids of each; longer ones are ignored."""
        allowed = params.allowed_token_ids
        early = frozenset(params.stop_token_ids or ()) if params.min_tokens else frozenset[int]()
        always = frozenset(word[0] for word in bad_words if len(word) == 1)
        if not always and not early and allowed is None:
            return None
        return Barred(always, early, params.min_tokens, None if allowed is None else frozenset(allowed))

    def left(self, tokens: Collection[int], *, is_early: bool) -> list[int]:
        """Return the tokens that are not barred."""
        barred = self.always | self.early if is_early else self.always
        return [t for t in tokens if t not in barred and (self.allowed is None or t in self.allowed)]


def may_end(
    matcher: llguidance.LLMatcher, barred: Barred, tokens: llguidance.LLTokenizer, *, is_json: bool
) -> bool:
    """Return whether an output may exist; False if every output of the grammar leads to a dead end.

    Between parts of JSON, white space of more than one character is not searched. States that differ in white
    space alone and go on with the same tokens count as one.
    """
    num_early = min(barred.num_early, 1) if is_json else barred.num_early  # white space may come meanwhile
    pending = [(matcher.deep_copy(), b"", 0)]
    seen: set[tuple[bytes, bool, int, bytes]] = set()
    while pending:
        state, text, count = pending.pop()
        if state.is_accepting() or state.is_stopped():
            if not state.is_error():
                return True
            continue
        mask = state.compute_bitmask()
        key = (b"".join(text.split()), text[-1:].isspace(), min(count, num_early), mask)
        if state.is_error() or key in seen:
            continue
        seen.add(key)
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        left = barred.left(bits.nonzero()[0].tolist(), is_early=count < num_early)
        if len(seen) > MAX_STATES or len(left) > MAX_TOKENS:
            return True
        pieces = {token: tokens.decode_bytes([token]) for token in left}
        if is_json and _is_between(text):
            pieces = {token: piece for token, piece in pieces.items() if not _is_more_space(piece, text)}
        if len(pieces) > MAX_BRANCHES:
            return True
        for token, piece in pieces.items():
            further = state.deep_copy()
            if further.consume_token(token):
                pending.append((further, text + piece, count + 1))
    return False


def _is_between(text: bytes) -> bool:
    """Return whether a text ends between parts of JSON, or after the marker that opens a call."""
    is_within = (text.count(b'"') - text.count(b'\\"')) % 2
    return not is_within and (b"{" in text or b"[" in text or text.rstrip().endswith(b">"))


def _is_more_space(piece: bytes, text: bytes) -> bool:
    return piece.isspace() and (text[-1:].isspace() or piece not in (b" ", b"\n"))
