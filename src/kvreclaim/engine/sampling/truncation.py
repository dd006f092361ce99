"""top-k, top-p and min-p without sorting the vocabulary, where the likeliest tokens settle it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CANDIDATES = 1024
"""Likeliest tokens looked at before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens kept in a row: the top_k likeliest (<= 0: all), of these the fewest that reach top_p, of these
    the ones of at least min_p times the likeliest."""

    top_k: int
    top_p: float
    min_p: float

    @property
    def keeps_all(self) -> bool:
        return self.top_k <= 0 and self.top_p >= 1.0 and self.min_p <= 0.0


def race_among_kept(logits: Tensor, race: Tensor, cuts: list[Cut]) -> Tensor:
    """The token with the largest race value among those each row keeps: [N] int64.

    Args:
        logits: [N, V] fp32, temperature applied; race: [N, V], logits less the log of the noise
    """
    vocab = logits.shape[-1]
    winners = torch.empty(len(cuts), dtype=torch.int64, device=logits.device)
    pending = list(range(len(cuts)))
    for size in (CANDIDATES, vocab):
        few = [i for i in pending if size >= vocab or cuts[i].top_k <= size]
        if not few:
            continue
        kept, order, settled = _kept(logits[few], [cuts[i] for i in few], min(size, vocab))
        best = race[few].gather(-1, order).masked_fill(~kept, float("-inf")).argmax(-1, keepdim=True)
        chosen = order.gather(-1, best)[:, 0]
        done = [n for n, ok in enumerate(settled.tolist()) if ok]
        winners[[few[n] for n in done]] = chosen[done]
        pending = sorted(set(pending) - {few[n] for n in done})
    assert not pending, f"rows {pending} of {len(cuts)} were not settled by the whole vocabulary"
    return winners


def _kept(logits: Tensor, cuts: list[Cut], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Filter the `size` likeliest tokens: which are kept [n, size], their ids [n, size], and for which rows
    that is all that is kept [n]."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    vocab = logits.shape[-1]
    values, order = logits.topk(size, dim=-1)
    top_k = column([cut.top_k if 0 < cut.top_k < vocab else vocab for cut in cuts])
    values = values.masked_fill(torch.arange(size, device=logits.device) >= top_k, float("-inf"))
    total = torch.where(top_k >= vocab, logits.logsumexp(-1, True), values.logsumexp(-1, True))
    probs = (values - total).exp()
    before = probs.cumsum(-1) - probs
    kept = (before < column([cut.top_p for cut in cuts])) & (values > float("-inf"))
    kept &= probs >= column([cut.min_p for cut in cuts]) * probs[:, :1]
    kept[:, 0] = True
    settled = (~kept[:, -1]) | (top_k[:, 0] <= size) | (size >= vocab)
    return kept, order, settled
