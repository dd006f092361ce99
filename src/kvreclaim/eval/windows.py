"""Windows of running text, or of random tokens: the examples of perplexity, which is here, and agreement."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvreclaim.engine.face.llm import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.task import SEED_STRIDE, Answer, Item, Metric, Outcome


@dataclass(frozen=True)
class TextWindows:
    """Disjoint windows of a text, in its order. Where more windows exist than are wanted, the first ones
    are taken.

    tokens: of the whole text, without special tokens
    prefix: what the tokenizer puts in front of every text (its begin token), or nothing
    """

    tokens: tuple[int, ...]
    prefix: tuple[int, ...]
    num_tokens: int
    seeded = False

    @classmethod
    def read(cls, llm: LLM, path: Path, num_tokens: int) -> TextWindows:
        """Raises: InvalidArgumentError for a file that is missing, not UTF-8 or shorter than one window."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"the text {str(path)!r} cannot be read: {error}.") from error
        plain = tuple(llm.tokenizer.encode(text, add_special_tokens=False))
        empty = llm.tokenizer.encode("")
        begin = llm.tokenizer.bos_token_id
        prefix = (begin,) if begin is not None and begin in empty else ()
        if len(plain) + len(prefix) < num_tokens:
            raise InvalidArgumentError(
                f"the text {str(path)!r} has {len(plain)} tokens, less than one window of {num_tokens}; pass "
                "a longer text or lower the number of tokens."
            )
        return cls(plain, prefix, num_tokens)

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        digest = hashlib.sha256(repr((self.tokens, self.prefix)).encode()).hexdigest()[:24]
        return {"text": digest, "num_tokens": self.num_tokens}

    @property
    def _stride(self) -> int:
        return self.num_tokens - len(self.prefix)

    def num_examples(self, wanted: int) -> int:
        return min(wanted, len(self.tokens) // self._stride)

    def item(self, seed: int, index: int) -> Item:
        start = index * self._stride
        return _halves((*self.prefix, *self.tokens[start : start + self._stride]))


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
        return _halves(tuple(rng.choices(range(self.vocab_size), k=self.num_tokens)))


@dataclass(frozen=True)
class WindowTask:
    """A task whose examples are windows, scored over their second halves."""

    windows: TextWindows | RandomWindows
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
    """exp of the mean negative log-likelihood over the second half of every window (teacher-forced); the
    first half is the prompt. It does not see lost needles: never judge a policy by it alone."""

    name = "perplexity"
    metric = Metric.PERPLEXITY

    def judge(self, item: Item, answer: Answer) -> Outcome:
        return Outcome(points=-sum(answer.logprobs), out_of=len(answer.logprobs))


def _halves(tokens: tuple[int, ...]) -> Item:
    middle = len(tokens) // 2
    return Item(tokens[:middle], tokens[middle:])
