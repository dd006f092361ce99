"""Tokens are drawn from compressed caches, one after the other, as the full caches would be asked to."""

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
"""Drafts go on until they are believed together with less than this."""


@dataclass(slots=True, eq=False)
class CompanionDraft:
    """One sequence that drafts: its companion has room for `most` tokens behind what it holds, `first` of
    them.

    confidence: that all of its tokens will be accepted, as far as one can tell from how often tokens that
                were as probable have been
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
        """The next token."""
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
    """Draw for all of them together, until none goes on. A token is drawn with the noise with which the
    target will draw in its place (a copy of its generator), so that both say the same where they think
    alike."""
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
    """Give each its token. Returns: those whose logits are numbers."""
    best = logits.max(-1)
    sound = best.values.isfinite().tolist()
    asks = [draft.companion.sample_row(eos_token_ids) for draft in going]
    found = draw(logits, best.indices.tolist(), list(range(len(going))), asks)
    drawn = [0 if isinstance(each, Exception) else each.token for each in found]
    chosen = logits.float().log_softmax(-1)[range(len(drawn)), drawn].exp().tolist()
    left = []
    for draft, is_sound, each, probability in zip(going, sound, found, chosen, strict=True):
        if is_sound and not isinstance(each, Exception):
            draft.take(each.token, probability)
            left.append(draft)
    return left


def _copy_of(generator: torch.Generator | None) -> torch.Generator | None:
    if generator is None:
        return None
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy
