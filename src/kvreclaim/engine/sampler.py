"""Draw one token per row, all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.config import SamplingParams
from kvreclaim.engine.outputs import Logprob
from kvreclaim.engine.truncation import Cut, race_among_kept


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

    @property
    def is_argmax(self) -> bool:
        """Whether the token is the row's argmax and nothing is to be reported."""
        p = self.params
        penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
        return p.temperature == 0 and p.logprobs is None and not self.forbidden and not penalties


def draw(
    logits: Tensor, best: list[int], rows: list[int], asked: list[SampleRow]
) -> tuple[list[int], list[dict[int, Logprob] | None]]:
    """A token for each ask from its row of logits [R, V]; best: [R] the rows' argmax, which is all that
    most greedy asks need.

    Returns: token ids, and per ask the log-probabilities asked for.
    """
    tokens = [best[row] for row in rows]
    reports: list[dict[int, Logprob] | None] = [None] * len(rows)
    if hard := [i for i, ask in enumerate(asked) if not ask.is_argmax]:
        drawn = sample(logits[[rows[i] for i in hard]].float(), [asked[i] for i in hard])
        for i, token, report in zip(hard, *drawn, strict=True):
            tokens[i], reports[i] = token, report
    return tokens, reports


@torch.inference_mode()
def sample(logits: Tensor, rows: list[SampleRow]) -> tuple[list[int], list[dict[int, Logprob] | None]]:
    """Draw a token for each row of logits [N, V] fp32 (changed in place by penalties).

    Returns: token ids, and per row the log-probabilities asked for.
    """
    logprobs = _raw_logprobs(logits, rows)
    for i, row in enumerate(rows):
        _penalise(logits[i], row)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if len(drawn) == len(rows):
        tokens = _draw(logits, rows).tolist()
    else:
        best = logits.argmax(-1)
        if drawn:
            best[drawn] = _draw(logits[drawn], [rows[i] for i in drawn])
        tokens = best.tolist()
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
    """Temperature, then top-k, top-p and min-p; exponential race. A token's noise depends on its id and
    its row alone, so neither the batch nor the way the candidates are found changes a draw."""
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    logits = logits / temperatures[:, None].clamp_min(1e-5)
    keep_nonzero = torch.finfo(torch.float32).tiny
    noise = torch.stack([_exponential(logits.shape[-1], row.generator, logits.device) for row in rows])
    race = logits - noise.clamp_min_(keep_nonzero).log_()
    cuts = [Cut(row.params.top_k, row.params.top_p, row.params.min_p) for row in rows]
    cut = [i for i, c in enumerate(cuts) if not c.keeps_all]
    if not cut:
        return race.argmax(-1)
    winners = race.argmax(-1)
    winners[cut] = race_among_kept(logits[cut], race[cut], [cuts[i] for i in cut])
    return winners


def _exponential(size: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Noise from the row's own generator, which lives on the CPU."""
    return torch.empty(size).exponential_(generator=generator).to(device)
