"""Windows of running text, or of random tokens: the examples of perplexity and agreement."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvreclaim.eval.passages import Passages, spread_order
from kvreclaim.eval.task import SEED_STRIDE, Answer, Item, Metric, TaskScore


@dataclass(frozen=True)
class TextWindows:
    """Windows of a text, in which no token is scored twice.

    num_scored: of a window's last tokens; the next window begins that many tokens later, and any number of
                examples is evenly spread over the text. None: the second half; windows are disjoint and in
                the order of the text
    """

    text: Passages
    num_tokens: int
    num_scored: int | None = None
    seeded = False

    def __post_init__(self) -> None:
        self.text.check_room(self.num_tokens - len(self.text.prefix))

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "text": self.text.digest,
            "num_tokens": self.num_tokens,
            "num_scored": self.num_scored,
            "spread": self.num_scored is not None,
        }

    @property
    def _size(self) -> int:
        return self.num_tokens - len(self.text.prefix)

    @property
    def _stride(self) -> int:
        return self.num_scored or self._size

    @property
    def _count(self) -> int:
        return 1 + (len(self.text.tokens) - self._size) // self._stride

    def num_examples(self, wanted: int) -> int:
        return min(wanted, self._count)

    def item(self, seed: int, index: int) -> Item:
        number = index if self.num_scored is None else spread_order(self._count)[index]
        start = number * self._stride
        tokens = (*self.text.prefix, *self.text.tokens[start : start + self._size])
        return _cut(tokens, self.num_scored or self.num_tokens - self.num_tokens // 2)


@dataclass(frozen=True)
class RandomWindows:
    """Token ids drawn evenly from the model's vocabulary."""

    vocab_size: int
    num_tokens: int
    seeded = True

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"text": "random", "vocab_size": self.vocab_size, "num_tokens": self.num_tokens}

    def num_examples(self, wanted: int) -> int:
        return wanted

    def item(self, seed: int, index: int) -> Item:
        rng = random.Random(f"windows:{seed * SEED_STRIDE + index}")
        tokens = tuple(rng.choices(range(self.vocab_size), k=self.num_tokens))
        return _cut(tokens, self.num_tokens - self.num_tokens // 2)


class WindowExamples(Protocol):
    """Examples without verdicts; the methods are those of Task."""

    @property
    def seeded(self) -> bool: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    def num_examples(self, wanted: int) -> int: ...

    def item(self, seed: int, index: int) -> Item: ...


@dataclass(frozen=True)
class WindowTask:
    """A task with windows as examples, scored over their ends."""

    windows: WindowExamples
    name: str
    compares = False

    @property
    def seeded(self) -> bool:
        return self.windows.seeded

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.windows.identity

    def num_examples(self, wanted: int) -> int:
        return self.windows.num_examples(wanted)

    def item(self, seed: int, index: int) -> Item:
        return self.windows.item(seed, index)


@dataclass(frozen=True)
class Perplexity(WindowTask):
    """exp of the mean negative log-likelihood over the end of every window (teacher-forced); the rest is the
    prompt. It does not see lost needles: never judge a policy by it alone."""

    metric = Metric.PERPLEXITY

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        nll = -sum(answer.logprobs)
        return TaskScore(nll, len(answer.logprobs), extra={"nll": nll / len(answer.logprobs)})


def _cut(tokens: tuple[int, ...], num_scored: int) -> Item:
    return Item(tokens[:-num_scored], tokens[-num_scored:])
