"""Drafts by a smaller model with the same tokenizer, over a cache of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.sampling.sampler import draw
from kvreclaim.engine.speculative.draft_cache import DraftCache
from kvreclaim.engine.speculative.drafter import Drafter
from kvreclaim.engine.speculative.load import DraftModel
from kvreclaim.model.loader import LoadedModel

LEAST_CONFIDENCE = 0.3
"""Drafting ends before the token with which the draft model's probabilities of its drafts, multiplied, fall
below: the target says the same about as often, and each row costs it as much whether it stands or not."""


@dataclass(slots=True, eq=False)
class Draught:
    """The drafts of one sequence in a round. own: the draft model's; most: tokens at most"""

    seq: Sequence
    own: Sequence
    most: int
    drafts: list[int] = field(default_factory=list)
    confidence: float = 1.0


class DraftModelDrafter(Drafter):
    """All sequences together: what the target has said since is read in one pass, then each further pass
    drafts a token of each.

    A draft is drawn as the target's token will be, with the same processors over the same tokens, and from a
    copy of the output's generator: the same noise meets both distributions, so that the two agree about as
    often as they can: P = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i).
    """

    def __init__(self, limit: int, *, target: LoadedModel, draft: DraftModel) -> None:
        super().__init__(limit)
        self.cache = DraftCache(draft)
        self._name, self._eos, self._vocab_size = draft.loaded.name, target.eos_token_ids, target.vocab_size

    def drafts(self) -> str:
        return f"{self.limit} tokens by {self._name}, {self.cache.memory.pool.num_blocks} blocks"

    def draft(self, asked: list[tuple[Sequence, int]]) -> None:
        try:
            self._draft(asked)
        except Exception:
            for seq, _ in asked:
                self.cache.forget(seq.seq_id)
            raise

    def released(self, seq_id: int) -> None:
        self.cache.forget(seq_id)

    def _draft(self, asked: list[tuple[Sequence, int]]) -> None:
        self.cache.begin_round(seq for seq, _ in asked)
        rounds: dict[int, Draught] = {}
        for seq, most in asked:
            most = min(most, self.cache.max_len + 1 - len(seq.token_ids))  # positions that this model has
            if most > 0 and (own := self.cache.follow(seq, most)) is not None:
                rounds[seq.seq_id] = Draught(seq, own, most)
        going = list(rounds.values())
        while going:
            read, logits = self.cache.read([each.own for each in going])
            going = self._extend([rounds[own.seq_id] for own in read], logits) if read else []
        for each in rounds.values():
            each.seq.draft_ids = each.drafts

    def _extend(self, going: list[Draught], logits: Tensor) -> list[Draught]:
        """A draft more for each, from its row of logits [n, V]. Returns: those that go on."""
        logits = self._fitted(logits.float())
        best = logits.max(-1)
        asks = [each.own.sample_row(self._eos) for each in going]
        drawn = draw(logits, best.indices.tolist(), list(range(len(going))), asks)
        tokens = torch.tensor([0 if isinstance(one, Exception) else one.token for one in drawn])
        told = logits.gather(-1, tokens.to(logits.device)[:, None])[:, 0] - logits.logsumexp(-1)
        finite, confidence = best.values.isfinite().tolist(), told.exp().tolist()
        on = []
        for place, (each, one) in enumerate(zip(going, drawn, strict=True)):
            if not finite[place] or isinstance(one, Exception):
                self.cache.refuse(each.seq.seq_id)
                continue
            each.confidence *= confidence[place]
            if each.confidence < LEAST_CONFIDENCE:
                continue
            each.drafts.append(one.token)
            each.own.token_ids.append(one.token)
            if len(each.drafts) < each.most and one.token not in self._eos:
                on.append(each)
        return on

    def _fitted(self, logits: Tensor) -> Tensor:
        """[n, V of the target]: ids beyond are never drafted, those that are lacking neither."""
        missing = self._vocab_size - logits.shape[-1]
        return (
            pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, : self._vocab_size]
        )
