"""Logits processors: bias, penalties, forbidden tokens.

Each processor works on all rows that it applies to at once. A row's numbers do not depend on the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.sampling.refusal import conflict
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvreclaim.engine.sampling.grammar import Matcher


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """One row's request.

    prompt, generated: token ids so far, for penalties
    forbidden:         token ids that may not come now (end tokens before min_tokens, ends of bad words)
    generator:         the output's own source of randomness, on the CPU: batching changes nothing
    matcher:           where the output stands in its grammar
    forced:            the only token that may come now, whatever the other options are
    """

    params: SamplingParams
    prompt: list[int]
    generated: list[int]
    forbidden: tuple[int, ...]
    generator: torch.Generator | None
    matcher: Matcher | None = None
    forced: int | None = None

    def takes(self, best: int) -> bool:
        """Return whether the token is the row's argmax, `best`, and no log-probabilities are reported."""
        if self.params.temperature != 0 or self.params.logprobs is not None:
            return False
        return all(each.spares(self, best) for each in PROCESSORS)

    def conflict(self) -> InvalidArgumentError:
        """Return the refusal of a request that bars every token."""
        is_early = len(self.generated) < self.params.min_tokens and bool(self.forbidden)
        return conflict(self.params, is_early=is_early, is_structured=self.matcher is not None)

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
    """Divides positive logits of tokens in prompt and output by the penalty, multiplies negative ones (CTRL,
    arXiv 1909.05858)."""

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


class Structured(LogitsProcessor):
    """Only tokens come that the output's grammar goes on with."""

    def applies(self, row: SampleRow) -> bool:
        return row.matcher is not None

    def spares(self, row: SampleRow, best: int) -> bool:
        return row.matcher is None or row.matcher.validate_tokens([best]) == 1

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        from kvreclaim.engine.sampling.grammar import restrict

        restrict(logits, places, [row.matcher for row in rows if row.matcher is not None])


class ThinkingEnd(LogitsProcessor):
    """One token alone comes, which ends the reasoning."""

    def applies(self, row: SampleRow) -> bool:
        return row.forced is not None

    def apply(self, logits: Tensor, places: list[int], rows: Sequence[SampleRow]) -> None:
        index = _index(logits, places, [[row.forced] for row in rows if row.forced is not None])
        logits[places] = float("-inf")
        logits[index] = 0.0


def follow(matcher: Matcher, token: int) -> bool:
    """Take the next token into account. Returns: whether the output is complete.

    Raises: InvalidArgumentError for a grammar that cannot be followed any further.
    """
    if not matcher.consume_token(token):
        from kvreclaim.engine.sampling.grammar import broken

        raise broken(matcher)
    return bool(matcher.is_stopped())


RESTRICTIONS: tuple[LogitsProcessor, ...] = (Forbidden(), Allowed(), Structured(), ThinkingEnd())
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
    return tuple(
        word[-1] for word in words if tuple(generated[len(generated) + 1 - len(word) :]) == word[:-1]
    )


def _index(logits: Tensor, places: list[int], tokens: Sequence[Collection[int]]) -> tuple[Tensor, Tensor]:
    """Rows and columns of the tokens of each row, one after the other."""
    rows = np.repeat(places, [len(each) for each in tokens])
    columns = np.fromiter(chain.from_iterable(tokens), np.int64, len(rows))
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device)
