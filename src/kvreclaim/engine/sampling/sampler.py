"""Logits processors (bias, penalties, forbidden tokens), and the draw of one token per row.

All rows are drawn at once; a row's numbers do not depend on the others. If the likeliest tokens suffice, the
vocabulary is not sorted, and most of its noise is not generated.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.engine.sampling.logprobs import Logprob, report
from kvreclaim.engine.sampling.refusal import conflict
from kvreclaim.engine.sampling.rule import OutputRule
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.moving import to_device
from kvreclaim.ops.native import torch_alone
from kvreclaim.sampling_params import SamplingParams

SIZES = 256, 4096
"""Numbers of likeliest tokens that are tried before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """One row's request.

    prompt, generated: token ids so far, for penalties
    forbidden:         token ids that may not come now (end tokens before min_tokens, ends of bad words)
    generator:         the output's own source of randomness, on the CPU: batching changes nothing
    rule:              restricts the output's tokens
    forced:            the only token that may come now, whatever the other options are
    """

    params: SamplingParams
    prompt: list[int]
    generated: list[int]
    forbidden: tuple[int, ...]
    generator: torch.Generator | None
    rule: OutputRule | None = None
    forced: int | None = None

    def takes(self, best: int) -> bool:
        """Return whether the token is the row's argmax, `best`, and no log-probabilities are reported."""
        if self.params.temperature != 0 or self.params.logprobs is not None:
            return False
        return all(each.spares(self, best) for each in PROCESSORS)

    def conflict(self) -> InvalidArgumentError:
        """Return the refusal of a request that bars every token."""
        is_early = len(self.generated) < self.params.min_tokens and bool(self.forbidden)
        return conflict(self.params, is_early=is_early)

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens are barred."""
        return any(each.applies(self) for each in RESTRICTIONS)

    def key(self) -> Tensor | None:
        """[] int64 on the CPU, from which all noise of the next token is made; None for a greedy row."""
        if self.params.temperature == 0:
            return None
        return torch.empty((), dtype=torch.int64).random_(generator=self.generator)


class LogitsProcessor(ABC):
    """Changes logits of the rows to which it applies. Its failure ends these requests alone."""

    @abstractmethod
    def applies(self, row: SampleRow) -> bool:
        """Return whether the row's logits would change."""

    def spares(self, row: SampleRow, best: int) -> bool:
        """Return whether `best`, the row's argmax, is sure to remain the argmax."""
        return not self.applies(row)

    @abstractmethod
    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        """Change logits [N, V] fp32 in place, in the rows at these places, which belong to these requests."""


class LogitBias(LogitsProcessor):
    """Adds a number to some tokens' logits."""

    def applies(self, row: SampleRow) -> bool:
        return bool(row.params.logit_bias)

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        biases = [row.params.logit_bias or {} for row in rows]
        index = _index(logits, places, [list(bias) for bias in biases])
        values = [value for bias in biases for value in bias.values()]
        logits[index] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


class RepetitionPenalty(LogitsProcessor):
    """Divides positive logits of known tokens by the penalty, multiplies negative ones (arXiv 1909.05858)."""

    def applies(self, row: SampleRow) -> bool:
        return row.params.repetition_penalty != 1.0

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        where, tokens = _index(logits, places, [{*row.prompt, *row.generated} for row in rows])
        own = torch.ones(logits.shape[0], dtype=logits.dtype)
        own[places] = torch.tensor([row.params.repetition_penalty for row in rows], dtype=logits.dtype)
        values, penalty = logits[where, tokens], own.to(logits.device)[where]
        logits[where, tokens] = torch.where(values > 0, values / penalty, values * penalty)


class CountPenalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, over the output."""

    def applies(self, row: SampleRow) -> bool:
        return bool(row.params.presence_penalty or row.params.frequency_penalty) and bool(row.generated)

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        where, tokens = _index(logits, places, [row.generated for row in rows])
        vocab = logits.shape[-1]
        keys, counts = (where * vocab + tokens).unique(return_counts=True)
        own = torch.zeros((2, logits.shape[0]), dtype=logits.dtype, device=logits.device)
        penalties = [[row.params.presence_penalty, row.params.frequency_penalty] for row in rows]
        own[:, places] = torch.tensor(penalties, dtype=logits.dtype, device=logits.device).T
        presence, frequency = own[:, keys // vocab]
        logits[keys // vocab, keys % vocab] -= presence + frequency * counts


class Forbidden(LogitsProcessor):
    """End tokens do not come before min_tokens, and no token completes a bad word."""

    def applies(self, row: SampleRow) -> bool:
        return bool(row.forbidden)

    def spares(self, row: SampleRow, best: int) -> bool:
        return best not in row.forbidden

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        logits[_index(logits, places, [list(row.forbidden) for row in rows])] = float("-inf")


class Allowed(LogitsProcessor):
    """Only some tokens come."""

    def applies(self, row: SampleRow) -> bool:
        return row.params.allowed_token_ids is not None

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        index = _index(logits, places, [sorted({*(row.params.allowed_token_ids or ())}) for row in rows])
        kept = logits[index]
        logits[places] = float("-inf")
        logits[index] = kept


class Ruled(LogitsProcessor):
    """Only tokens come that the output's rule allows."""

    def applies(self, row: SampleRow) -> bool:
        return row.rule is not None

    def spares(self, row: SampleRow, best: int) -> bool:
        return row.rule is None or row.rule.allows(best)

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        rules = [(place, row.rule) for place, row in zip(places, rows, strict=True) if row.rule is not None]
        for kind in dict.fromkeys(type(rule) for _, rule in rules):
            own = [each for each in rules if type(each[1]) is kind]
            kind.restrict(logits, [place for place, _ in own], [rule for _, rule in own])


class ThinkingEnd(LogitsProcessor):
    """One token alone comes, which ends the reasoning."""

    def applies(self, row: SampleRow) -> bool:
        return row.forced is not None

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        index = _index(logits, places, [[row.forced] for row in rows if row.forced is not None])
        logits[places] = float("-inf")
        logits[index] = 0.0


RESTRICTIONS: tuple[LogitsProcessor, ...] = (Forbidden(), Allowed(), Ruled(), ThinkingEnd())
PROCESSORS: tuple[LogitsProcessor, ...] = (LogitBias(), RepetitionPenalty(), CountPenalties(), *RESTRICTIONS)
"""In the order in which they change logits. vLLM restricts first, which comes to the same."""


def process(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Change logits [N, V] fp32 in place by the options of each row."""
    for processor in PROCESSORS:
        places = [i for i, row in enumerate(rows) if processor.applies(row)]
        if places:
            processor.apply(logits, places, [rows[i] for i in places])


def word_ids(word: str, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token ids of a word, as it is given, at the start of a text and behind a space."""
    bare = word.lstrip(" ")
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, bare, " " + bare))
    return tuple(dict.fromkeys(filter(None, found)))


def completing(words: Sequence[tuple[int, ...]], generated: list[int]) -> tuple[int, ...]:
    """Return the last tokens of words of which all other tokens have just been generated."""
    size = len(generated) + 1
    return tuple(word[-1] for word in words if tuple(generated[size - len(word) :]) == word[:-1])


def _index(logits: Tensor, places: list[int], tokens: Sequence[Collection[int]]) -> tuple[Tensor, Tensor]:
    """Rows and columns of the tokens of each row, one after the other."""
    rows = np.repeat(places, [len(each) for each in tokens])
    columns = np.fromiter(chain.from_iterable(tokens), np.int64, len(rows))
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, and the requested log-probabilities."""

    token: int
    logprobs: dict[int, Logprob] | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """Tokens kept in a row: the top_k likeliest (<= 0: all), of these the fewest that reach top_p (one at
    least), of these the ones of at least min_p times the likeliest."""

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
            index = to_device(np.array([rows[i] for i in places]), logits.device)
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
    reports = any(row.params.logprobs is not None for row in rows)
    logprobs = torch.log_softmax(logits, dim=-1) if reports else None
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
    settings, noise = to_device(np.array(table, dtype=np.float32), device), to_device(keys, device)
    winners, pending = [0] * len(rows), list(range(len(rows)))
    for size in (*SIZES, vocab):
        few = [i for i in pending if size >= vocab or cuts[i].top_k <= size]
        if not few:
            continue
        at = slice(None) if len(few) == len(rows) else to_device(np.array(few), device)
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
        at = to_device(np.array(behind), device)
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
