"""Draw one token per row, all rows at once.

If the likeliest tokens suffice, the vocabulary is not sorted, and most of its noise is not generated.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.engine.sampling.logprobs import Logprob, report
from kvreclaim.engine.sampling.processors import SampleRow, process
from kvreclaim.ops.moving import move
from kvreclaim.ops.native import torch_alone

logger = logging.getLogger(__name__)

SIZES = 256, 4096
"""Numbers of likeliest tokens that are tried before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, and the requested log-probabilities."""

    token: int
    logprobs: dict[int, Logprob] | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens kept in a row: the top_k likeliest (<= 0: all), of these the fewest that reach top_p, of these
    the ones of at least min_p times the likeliest."""

    top_k: int
    top_p: float
    min_p: float

    def settings(self, vocab: int) -> tuple[float, float, float, float]:
        """top_k at most `vocab`, top_p (infinite if it cuts nothing), min_p, and 1 if all tokens stay."""
        keeps_all = self.top_k <= 0 and self.top_p >= 1.0 and self.min_p <= 0.0
        top_k = self.top_k if 0 < self.top_k < vocab else vocab
        return top_k, self.top_p if self.top_p < 1 else math.inf, self.min_p, float(keeps_all)


def draw(
    logits: Tensor, best: list[int], rows: list[int], sample_rows: list[SampleRow]
) -> list[SampledToken | Exception]:
    """Draw a token for each sample row from its row of logits [R, V]. best: [R] the rows' argmax, which
    suffices for most greedy requests.

    A sample row that fails gives its error. The tokens of others do not depend on it.
    """
    found: list[SampledToken | Exception] = [SampledToken(best[row]) for row in rows]
    keys: dict[int, Tensor | None] = {}
    for i, sample_row in enumerate(sample_rows):
        try:
            if not sample_row.takes(best[rows[i]]):
                keys[i] = sample_row.key()
        except Exception as error:
            found[i] = error

    def drawn(places: list[int]) -> list[SampledToken | Exception]:
        with torch_alone():
            index = move(np.array([rows[i] for i in places]), logits.device)
            chosen = logits.index_select(0, index).float()
            return _sample(chosen, [sample_rows[i] for i in places], [keys[i] for i in places])

    hard = list(keys)
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
    logits: Tensor, rows: list[SampleRow], keys: list[Tensor | None]
) -> list[SampledToken | Exception]:
    """Draw a token for each row of logits [N, V] fp32 by the rows' keys; an error for a row with all tokens
    barred. Changes the logits."""
    logprobs = _raw_logprobs(logits, rows)
    process(logits, rows)
    drawn = [i for i, key in enumerate(keys) if key is not None]
    tokens = [0] * len(rows) if len(drawn) == len(rows) else logits.argmax(-1).tolist()
    if drawn:
        chosen = logits if len(drawn) == len(rows) else logits[drawn]
        noise = torch.stack([key for key in keys if key is not None])
        for i, token in zip(drawn, _draw(chosen, [rows[i] for i in drawn], noise), strict=True):
            tokens[i] = token
    found: list[SampledToken | Exception] = [
        SampledToken(tokens[i], _report(logprobs, i, tokens[i], row)) for i, row in enumerate(rows)
    ]
    if restricted := [i for i, row in enumerate(rows) if row.is_restricted]:
        values = logits[restricted, [tokens[i] for i in restricted]].tolist()
        for i in (i for i, value in zip(restricted, values, strict=True) if value == -math.inf):
            found[i] = rows[i].conflict()
    return found


def _raw_logprobs(logits: Tensor, rows: list[SampleRow]) -> Tensor | None:
    if all(row.params.logprobs is None for row in rows):
        return None
    return torch.log_softmax(logits, dim=-1)


def _report(logprobs: Tensor | None, i: int, token: int, row: SampleRow) -> dict[int, Logprob] | None:
    if logprobs is None or row.params.logprobs is None:
        return None
    return report(logprobs[i : i + 1], [token], row.params.logprobs)[0]


def _draw(logits: Tensor, rows: list[SampleRow], keys: Tensor) -> list[int]:
    """Temperature, then top-k, top-p and min-p, then the token with the largest logit plus Gumbel noise.

    Looks at as few of the likeliest tokens as settle the row. A token's noise depends on its id and its row's
    key alone, so neither the batch nor their number changes a draw.
    """
    vocab, device = logits.shape[-1], logits.device
    cuts = [Cut(row.params.top_k, row.params.top_p, row.params.min_p) for row in rows]
    temperatures = [max(row.params.temperature, 1e-5) for row in rows]
    table = [(each, *cut.settings(vocab)) for each, cut in zip(temperatures, cuts, strict=True)]
    settings, noise = move(np.array(table, dtype=np.float32), device), move(keys, device)
    winners, pending = [0] * len(rows), list(range(len(rows)))
    for size in (*SIZES, vocab):
        few = [i for i in pending if size >= vocab or cuts[i].top_k <= size]
        if not few:
            continue
        at = slice(None) if len(few) == len(rows) else move(np.array(few), device)
        scaled = logits[at] / settings[at, :1]
        for i, token in zip(few, _race(scaled, settings[at], noise[at], min(size, vocab)), strict=True):
            if token is not None:
                winners[i] = token
                pending.remove(i)
        if not pending:
            break
    assert not pending, f"rows {pending} of {len(cuts)} were not settled by the whole vocabulary"
    return winners


def _race(scaled: Tensor, settings: Tensor, keys: Tensor, size: int) -> list[int | None]:
    """The winners among what is kept of the `size` likeliest tokens; None where these do not settle the draw.

    Where all tokens are kept, the others take part as one with their whole probability and the noise of id V.
    If it wins, they race among themselves: the same distribution, and their noise is seldom made.

    scaled: [n, V] fp32, temperature applied; settings: [n, 5] fp32, the temperature and Cut.settings
    """
    vocab, device = scaled.shape[-1], scaled.device
    _, top_k, top_p, min_p, keeps_all = settings.split(1, dim=1)
    order = scaled.topk(size, dim=-1).indices
    every = scaled.softmax(-1)
    probs = every.gather(-1, order).masked_fill_(torch.arange(size, device=device) >= top_k, 0.0)
    others = every.scatter_(-1, order, 0.0).sum(-1, keepdim=True)
    total = probs.sum(-1, keepdim=True) + others * (top_k >= vocab)
    before = probs.cumsum(-1) - probs
    kept = before < total * top_p
    kept &= (probs > 0) & (probs >= min_p * probs[:, :1])
    kept[:, 0] = True
    settled = ~kept[:, -1:] | (top_k <= size) | (keeps_all > 0) | (size >= vocab)
    noise = gumbel(keys[:, None], functional.pad(order, (0, 1), value=vocab))
    race = probs.log() + noise[:, :-1]
    best, place = race.masked_fill_(~kept, -math.inf).max(-1, keepdim=True)
    lost = (keeps_all > 0) & (others.log() + noise[:, -1:] > best)
    found = torch.cat((order.gather(-1, place), settled, lost), dim=1).tolist()
    winners = [token if is_settled else None for token, is_settled, _ in found]
    if behind := [n for n, row in enumerate(found) if row[2]]:
        at = move(np.array(behind), device)
        race = every[at].log() + gumbel(keys[at][:, None], torch.arange(vocab, device=device))
        for n, token in zip(behind, race.argmax(-1).tolist(), strict=True):
            winners[n] = token
    return winners


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise in fp64 of tokens, by key and id: Steele, Lea and Flood's SplitMix64 read at any place."""
    z = keys + (ids + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
    z = z ^ (z >> 31 & (1 << 33) - 1)
    uniform = ((z >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()
