"""Reported log-probabilities: of the most likely tokens, and of the sampled or given one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token before temperature and penalties; rank 1 is the most likely."""

    logprob: float
    rank: int


PromptLogprobs = list[dict[int, Logprob] | None]


MAX_ELEMENTS = 1 << 24
"""Most logits of a prompt that are turned into log-probabilities at once."""


def report(logprobs: Tensor, given: list[int], num_top: int) -> list[dict[int, Logprob]]:
    """Report for each row of logprobs [N, V] its num_top most likely tokens, -1 for all, and the given one if
    it is not among them. Ranks begin at 1; a given token's is one more than the number of likelier ones."""
    index = torch.tensor(given, device=logprobs.device)[:, None]
    own = logprobs.gather(-1, index)
    ranks = (logprobs > own).sum(-1, dtype=torch.int32) + 1
    vocab = logprobs.shape[-1]
    top = logprobs.topk(vocab if num_top < 0 else min(num_top, vocab), dim=-1)
    found = []
    rows = zip(
        given, own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
    )
    for token, value, rank, tokens, values in rows:
        line = {t: Logprob(v, i + 1) for i, (t, v) in enumerate(zip(tokens, values, strict=True))}
        line.setdefault(token, Logprob(value, rank))
        found.append(line)
    return found


def report_prompt(logits: Tensor, given: list[int], num_top: int) -> list[dict[int, Logprob]]:
    """Report from logits [N, V], a few rows at a time, because N is a whole chunk of a prompt."""
    num_rows = max(1, MAX_ELEMENTS // logits.shape[-1])
    found: list[dict[int, Logprob]] = []
    for piece in logits.split(num_rows):
        first = len(found)
        found += report(torch.log_softmax(piece.float(), -1), given[first : first + len(piece)], num_top)
    return found
