"""Drafts by a smaller model with the same tokenizer, over a cache of its own; the drafter that a config
names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvreclaim import speculation
from kvreclaim.config import EngineConfig
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.sampling.sampler import draw
from kvreclaim.engine.speculative.draft_cache import DraftCache
from kvreclaim.engine.speculative.drafter import Drafter, NgramDrafter
from kvreclaim.engine.speculative.load import DraftModel
from kvreclaim.model.loader import LoadedModel

LEAST_CONFIDENCE = 0.3
"""Drafting ends before the token at which the product of the drafts' probabilities falls below this. The
product estimates how often the target agrees, and a rejected row costs as much as an accepted one."""


@dataclass(slots=True, eq=False)
class Draught:
    """The drafts of one sequence in a round. own: the draft model's; most: tokens at most"""

    seq: Sequence
    own: Sequence
    most: int
    drafts: list[int] = field(default_factory=list)
    confidence: float = 1.0


class DraftModelDrafter(Drafter):
    """Drafts for all sequences together. One pass reads the target's new tokens. Each further pass drafts one
    token per sequence.

    A draft is drawn like the target's token, with the same processors over the same tokens and a copy of the
    output's generator. Shared noise makes the two agree with the probability
    P = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), close to the maximum.
    """

    def __init__(self, limit: int, *, target: LoadedModel, draft: DraftModel) -> None:
        super().__init__(limit)
        self.cache = DraftCache(draft)
        self._name, self._eos, self._vocab_size = draft.loaded.name, target.eos_token_ids, target.vocab_size

    def drafts(self) -> str:
        return f"{self.limit} tokens by {self._name}, {self.cache.memory.pool.num_blocks} blocks"

    def draft(self, requested: list[tuple[Sequence, int]]) -> None:
        try:
            self._draft(requested)
        except Exception:
            for seq, _ in requested:
                self.cache.forget(seq.seq_id)
            raise

    def released(self, seq_id: int) -> None:
        self.cache.forget(seq_id)

    def _draft(self, requested: list[tuple[Sequence, int]]) -> None:
        self.cache.begin_round(seq for seq, _ in requested)
        rounds: dict[int, Draught] = {}
        for seq, most in requested:
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
        """Append one draft for each, from its row of logits [n, V]. Returns: those that go on."""
        logits = self._fitted(logits.float())
        best = logits.max(-1)
        sample_rows = [each.own.sample_row(self._eos) for each in going]
        drawn = draw(logits, best.indices.tolist(), list(range(len(going))), sample_rows)
        tokens = torch.tensor([0 if isinstance(one, Exception) else one.token for one in drawn])
        logprobs = logits.gather(-1, tokens.to(logits.device)[:, None])[:, 0] - logits.logsumexp(-1)
        finite, confidence = best.values.isfinite().tolist(), logprobs.exp().tolist()
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
        """Return logits [n, V of the target]. Ids that either model lacks are never drafted."""
        missing = self._vocab_size - logits.shape[-1]
        return (
            pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, : self._vocab_size]
        )


def make_drafter(config: EngineConfig, target: LoadedModel, draft: DraftModel | None) -> Drafter | None:
    """Return the drafter; None without speculation. draft: the result of load_draft for this config"""
    settings = speculation.from_json(config.speculative_config)
    if settings is None:
        return None
    if settings.model is not None:
        assert draft is not None, "load_draft loads it"
        return DraftModelDrafter(settings.num_speculative_tokens, target=target, draft=draft)
    least, most = settings.prompt_lookup_min, settings.prompt_lookup_max
    return NgramDrafter(settings.num_speculative_tokens, least=least, most=most)
