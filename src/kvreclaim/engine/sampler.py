"""Draw one token per row, all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.config import SamplingParams
from kvreclaim.engine.outputs import Logprob


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """One row's request.

    prompt, generated: token ids so far, for penalties
    forbidden:         token ids that may not come yet (end tokens before min_tokens)
    generator:         the output's own source of randomness, so that batching changes nothing
    """

    params: SamplingParams
    prompt: list[int]
    generated: list[int]
    forbidden: tuple[int, ...]
    generator: torch.Generator | None


@torch.inference_mode()
def sample(logits: Tensor, rows: list[SampleRow]) -> tuple[list[int], list[dict[int, Logprob] | None]]:
    """Draw a token for each row of logits [N, V] fp32 (changed in place by penalties).

    Returns: token ids, and per row the log-probabilities asked for.
    """
    logprobs = _raw_logprobs(logits, rows)
    for i, row in enumerate(rows):
        _penalise(logits[i], row)
    greedy = logits.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        greedy[drawn] = _draw(logits[drawn], [rows[i] for i in drawn])
    tokens = greedy.tolist()
    return tokens, [_report(logprobs, i, tokens[i], row) for i, row in enumerate(rows)]


def _raw_logprobs(logits: Tensor, rows: list[SampleRow]) -> Tensor | None:
    if all(row.params.logprobs is None for row in rows):
        return None
    return torch.log_softmax(logits, dim=-1)


def _report(logprobs: Tensor | None, i: int, token: int, row: SampleRow) -> dict[int, Logprob] | None:
    if logprobs is None or row.params.logprobs is None:
        return None
    line = logprobs[i]
    top = line.topk(min(row.params.logprobs, line.numel()))
    report = {
        t: Logprob(value, rank + 1)
        for rank, (t, value) in enumerate(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    }
    if token not in report:
        report[token] = Logprob(float(line[token]), int((line > line[token]).sum()) + 1)
    return report


def _penalise(logits: Tensor, row: SampleRow) -> None:
    """vLLM's meanings: repetition sees prompt and output, presence and frequency the output."""
    p = row.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.generated}), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and row.generated:
        tokens = torch.tensor(row.generated, device=logits.device)
        unique, counts = tokens.unique(return_counts=True)
        logits[unique] -= p.presence_penalty + p.frequency_penalty * counts
    if row.forbidden:
        logits[list(row.forbidden)] = float("-inf")


def _draw(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Temperature, then top-k, top-p and min-p on the sorted distribution; exponential race."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    vocab = logits.shape[-1]
    logits = logits / column([row.params.temperature for row in rows]).clamp_min(1e-5)
    values, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(vocab, device=logits.device)
    top_k = column([row.params.top_k if row.params.top_k > 0 else vocab for row in rows])
    values = values.masked_fill(rank >= top_k, float("-inf"))
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    cut = before >= column([row.params.top_p for row in rows])
    cut |= probs < column([row.params.min_p for row in rows]) * probs[:, :1]
    cut[:, 0] = False
    probs = probs.masked_fill(cut, 0.0)
    race = torch.stack([_exponential(vocab, row.generator, logits.device) for row in rows])
    winner = (probs / race).argmax(-1, keepdim=True)
    return order.gather(-1, winner)[:, 0]


def _exponential(size: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Noise from the row's own generator, which lives on the CPU."""
    return torch.empty(size).exponential_(generator=generator).clamp_min(1e-20).to(device)
