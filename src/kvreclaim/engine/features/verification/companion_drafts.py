"""Draw drafts from compressed caches, one token after the other, with the targets' sampling parameters."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvreclaim.engine.execute.recurrent import RecurrentStates
from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.engine.sampling.sampler import draw
from kvreclaim.ops.native import torch_alone
from kvreclaim.schedule import Row

LEAST_CONFIDENCE = 0.3
"""Drafting of a sequence ends when the confidence in all of its drafts falls below this."""


@dataclass(slots=True, eq=False)
class CompanionDraft:
    """The drafts of one sequence. Its companion holds `first` tokens and has room for `most` more.

    confidence: estimated probability that all of its tokens are accepted, from the acceptance rates of
                tokens with similar probabilities
    """

    target: Sequence
    companion: Sequence
    most: int
    first: int
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    confidence: float = 1.0

    @property
    def goes_on(self) -> bool:
        return len(self.tokens) < self.most and self.confidence >= LEAST_CONFIDENCE

    def take(self, token: int, probability: float) -> None:
        """Append the next token."""
        verify = self.target.request.verify
        assert verify is not None, f"sequence {self.target.seq_id} is not verified"
        self.tokens.append(token)
        self.probabilities.append(probability)
        self.companion.token_ids.append(token)
        self.confidence *= verify.belief(probability)


def draft_all(
    drafts: list[CompanionDraft],
    runner: ModelRunner,
    eos_token_ids: frozenset[int],
    states: RecurrentStates | None,
) -> None:
    """Draw for all drafts together, until none goes on. Each token is drawn with a copy of the target's
    generator. The target will draw with the same noise, so equal distributions give equal tokens."""
    for draft in drafts:
        draft.companion.generator = _copy_of(draft.target.generator)
    going = [draft for draft in drafts if draft.goes_on]
    with torch_alone():
        while going:
            items = [_next_of(draft) for draft in going]
            with nullcontext() if states is None else states.drafting(items):
                logits, _ = runner.forward(items, observed=False)
            going = [draft for draft in _drawn(going, logits, eos_token_ids) if draft.goes_on]


def _next_of(draft: CompanionDraft) -> Scheduled:
    companion, place = draft.companion, draft.companion.num_computed + len(draft.tokens)
    return Scheduled(companion, Row(companion.seq_id, place, 1, exact=False))


def _drawn(
    going: list[CompanionDraft], logits: Tensor, eos_token_ids: frozenset[int]
) -> list[CompanionDraft]:
    """Draw one token for each draft. Returns: the drafts with finite logits."""
    best = logits.max(-1)
    finite = best.values.isfinite().tolist()
    sample_rows = [draft.companion.sample_row(eos_token_ids) for draft in going]
    found = draw(logits, best.indices.tolist(), list(range(len(going))), sample_rows)
    drawn = [0 if isinstance(each, Exception) else each.token for each in found]
    chosen = logits.float().log_softmax(-1)[range(len(drawn)), drawn].exp().tolist()
    left = []
    for draft, is_finite, each, probability in zip(going, finite, found, chosen, strict=True):
        if is_finite and not isinstance(each, Exception):
            draft.take(each.token, probability)
            left.append(draft)
    return left


def _copy_of(generator: torch.Generator | None) -> torch.Generator | None:
    if generator is None:
        return None
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy
