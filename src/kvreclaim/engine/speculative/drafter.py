"""Drafters, drafts from a sequence's own tokens, and the number of drafts that a step may verify."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence as ListLike

import numpy as np

from kvreclaim.engine.extension import Extension
from kvreclaim.engine.request.request import Sequence
from kvreclaim.schedule import Status


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


logger = logging.getLogger(__name__)


def most_drafts(seq: Sequence, limit: int) -> int:
    """Return the number of drafts for a sequence's next step, at most `limit`. The sequence must draw alone
    and have nothing else to compute. No pass, and not its end, lies within the drafts."""
    request = seq.request
    draws = request.beams is None and request.scores is None and not seq.waits_for_fork and not seq.followers
    if not draws or seq.status is not Status.RUNNING or seq.num_uncomputed != 1 or seq.is_due:
        return 0
    until = seq.footprint.tokens_until_pass(seq.num_computed, seq.num_prompt, seq.account)
    return max(0, min(limit, until - 1, seq.max_len - len(seq.token_ids) - 1))


class Drafter(Extension):
    """Proposes the next tokens of running sequences."""

    rank = 40

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def propose(self, running: ListLike[Sequence]) -> None:
        """Set draft_ids of every sequence that may have some. A failure costs drafts only."""
        for seq in running:
            seq.draft_ids = []
        requested = [(seq, most_drafts(seq, self.limit)) for seq in running]
        try:
            self.draft([(seq, most) for seq, most in requested if most > 0])
        except Exception:
            logger.exception("drafting for %d sequences failed; they go on without drafts", len(requested))
            for seq in running:
                seq.draft_ids = []

    @abstractmethod
    def draft(self, requested: list[tuple[Sequence, int]]) -> None:
        """Set draft_ids of sequences. requested: each sequence with its maximum number of drafts."""

    @abstractmethod
    def drafts(self) -> str:
        """Return number and source of drafts, for the log line at the start."""

    def describe(self) -> str:
        return f"drafts: {self.drafts()}"


class NgramDrafter(Drafter):
    """Drafts from n-grams in the sequences' own tokens."""

    def __init__(self, limit: int, *, least: int, most: int) -> None:
        super().__init__(limit)
        self.least, self.most = least, most
        self._seen: dict[int, Seen] = {}

    def draft(self, requested: list[tuple[Sequence, int]]) -> None:
        for seq, most in requested:
            tokens = self._seen.setdefault(seq.seq_id, Seen()).grown(seq.token_ids)
            seq.draft_ids = propose(tokens, self.least, self.most, most)

    def released(self, seq_id: int) -> None:
        self._seen.pop(seq_id, None)

    def drafts(self) -> str:
        return f"{self.limit} tokens by ngram of {self.least} to {self.most}"
