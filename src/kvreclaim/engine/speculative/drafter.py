"""Drafters, and how much they draft: the rows of a step that may be guesses."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence as ListLike

from kvreclaim.engine.extension import Extension
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.speculative.ngram import Seen, propose
from kvreclaim.schedule import Status

logger = logging.getLogger(__name__)


def most_drafts(seq: Sequence, limit: int) -> int:
    """Tokens that may be guessed for a sequence's next step, `limit` at most: it draws alone, has nothing
    else to compute, and neither a pass nor its end lies within them."""
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
        """Give every sequence that may have some its draft_ids. What fails costs drafts, nothing else."""
        for seq in running:
            seq.draft_ids = []
        asked = [(seq, most_drafts(seq, self.limit)) for seq in running]
        try:
            self.draft([(seq, most) for seq, most in asked if most > 0])
        except Exception:
            logger.exception("drafting for %d sequences failed; they go on without drafts", len(asked))
            for seq in running:
                seq.draft_ids = []

    @abstractmethod
    def draft(self, asked: list[tuple[Sequence, int]]) -> None:
        """Set draft_ids of sequences, of each so many tokens at most."""

    @abstractmethod
    def drafts(self) -> str:
        """Number and source of drafts, for the line at the start."""

    def describe(self) -> str:
        return f"drafts: {self.drafts()}"


class NgramDrafter(Drafter):
    """From what the sequences say themselves."""

    def __init__(self, limit: int, *, least: int, most: int) -> None:
        super().__init__(limit)
        self.least, self.most = least, most
        self._seen: dict[int, Seen] = {}

    def draft(self, asked: list[tuple[Sequence, int]]) -> None:
        for seq, most in asked:
            tokens = self._seen.setdefault(seq.seq_id, Seen()).grown(seq.token_ids)
            seq.draft_ids = propose(tokens, self.least, self.most, most)

    def released(self, seq_id: int) -> None:
        self._seen.pop(seq_id, None)

    def drafts(self) -> str:
        return f"{self.limit} tokens by ngram of {self.least} to {self.most}"
