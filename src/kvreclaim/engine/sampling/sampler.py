"""Draw one token per row, all rows at once; top-k, top-p and min-p without sorting the vocabulary, where the
likeliest tokens settle it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.engine.sampling.logprobs import Logprob, report
from kvreclaim.engine.sampling.processors import SampleRow, process
from kvreclaim.ops.native import torch_alone

logger = logging.getLogger(__name__)

CANDIDATES = 1024
"""Likeliest tokens looked at before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, and the log-probabilities asked for."""

    token: int
    logprobs: dict[int, Logprob] | None = None


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


def draw(
    logits: Tensor, best: list[int], rows: list[int], asked: list[SampleRow]
) -> list[SampledToken | Exception]:
    """A token for each ask from its row of logits [R, V]; best: [R] the rows' argmax, which is all that
    most greedy asks need.

    An ask that cannot be met gives its error; the others get the tokens that they would have had.
    """
    found: list[SampledToken | Exception] = [SampledToken(best[row]) for row in rows]
    noises: dict[int, Tensor | None] = {}
    for i, ask in enumerate(asked):
        if not ask.is_argmax:
            try:
                noises[i] = ask.noise(logits.shape[-1])
            except Exception as error:
                found[i] = error

    def drawn(places: list[int]) -> list[SampledToken | Exception]:
        with torch_alone():
            chosen = logits[[rows[i] for i in places]].float()
            return _sample(chosen, [asked[i] for i in places], [noises[i] for i in places])

    hard = list(noises)
    try:
        for i, one in zip(hard, drawn(hard) if hard else [], strict=True):
            found[i] = one
    except Exception:
        logger.exception("drawing %d tokens at once failed; drawing one at a time", len(hard))
        for i in hard:
            try:
                found[i] = drawn([i])[0]
            except Exception as error:
                found[i] = error
    return found


@torch.inference_mode()
def _sample(
    logits: Tensor, rows: list[SampleRow], noises: list[Tensor | None]
) -> list[SampledToken | Exception]:
    """A token for each row of logits [N, V] fp32, which change, from noise that has been drawn; an error for
    a row of which no token may come."""
    logprobs = _raw_logprobs(logits, rows)
    process(logits, rows)
    noisy = [i for i, noise in enumerate(noises) if noise is not None]
    best = logits.argmax(-1) if len(noisy) < len(rows) else logits.new_empty(len(rows), dtype=torch.int64)
    if noisy:
        noise = torch.stack([n for n in noises if n is not None])
        chosen = logits if len(noisy) == len(rows) else logits[noisy]
        best[noisy] = _draw(chosen, [rows[i] for i in noisy], noise)
    tokens = best.tolist()
    found: list[SampledToken | Exception] = [
        SampledToken(tokens[i], _report(logprobs, i, tokens[i], row)) for i, row in enumerate(rows)
    ]
    if restricted := [i for i, row in enumerate(rows) if row.is_restricted]:
        values = logits[restricted, best[restricted]].tolist()
        for i in (i for i, value in zip(restricted, values, strict=True) if value == -math.inf):
            found[i] = ValueError(
                "allowed_token_ids, bad_words, min_tokens and structured_outputs leave no token that may come"
            )
    return found


def _raw_logprobs(logits: Tensor, rows: list[SampleRow]) -> Tensor | None:
    if all(row.params.logprobs is None for row in rows):
        return None
    return torch.log_softmax(logits, dim=-1)


def _report(logprobs: Tensor | None, i: int, token: int, row: SampleRow) -> dict[int, Logprob] | None:
    if logprobs is None or row.params.logprobs is None:
        return None
    return report(logprobs[i : i + 1], [token], row.params.logprobs)[0]


def _draw(logits: Tensor, rows: list[SampleRow], noise: Tensor) -> Tensor:
    """Temperature, then top-k, top-p and min-p; exponential race. A token's noise depends on its id and
    its row alone, so neither the batch nor the way the candidates are found changes a draw."""
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    logits = logits / temperatures[:, None].clamp_min(1e-5)
    keep_nonzero = torch.finfo(torch.float32).tiny
    race = logits - noise.clamp_min_(keep_nonzero).log_()
    cuts = [Cut(row.params.top_k, row.params.top_p, row.params.min_p) for row in rows]
    cut = [i for i, c in enumerate(cuts) if not c.keeps_all]
    if not cut:
        return race.argmax(-1)
    winners = race.argmax(-1)
    winners[cut] = race_among_kept(logits[cut], race[cut], [cuts[i] for i in cut])
    return winners


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
