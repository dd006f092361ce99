"""Base of the text tasks: a prompt of a given length, and an answer marked part by part."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreclaim.eval.task import Answer, Item, PlainTask, TaskScore
from kvreclaim.eval.text.prose import Encoder, ProseQuestion, fit

END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class TextTask(PlainTask):
    """Prompts of at most num_tokens - max_new_tokens tokens. A subclass writes and marks them.

    max_new_tokens: of the answer; a truncated answer is marked as it is
    """

    encode: Encoder
    num_tokens: int
    max_new_tokens: int

    @property
    @abstractmethod
    def name(self) -> str:
        """The task's name in the report."""

    @property
    def identity(self) -> Mapping[str, Any]:
        return {
            "dialect": "text",
            "template": self.encode.identity,
            "num_tokens": self.num_tokens,
            "max_new_tokens": self.max_new_tokens,
        }

    def item(self, seed: int, index: int) -> Item:
        def write(num_sentences: int) -> ProseQuestion:
            return self.write(random.Random(f"{self.name}:{seed}:{index}"), index, num_sentences)

        question, tokens = fit(write, self.encode, self.num_tokens - self.max_new_tokens, self.name)
        return Item(tokens, max_new_tokens=self.max_new_tokens, payload=question)

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        question: ProseQuestion = item.payload
        marks = self.mark(question, final_part(answer.text))
        share = len(item.prompt) / item.num_tokens
        placed = list(zip(question.evidence, marks, strict=True)) if question.evidence else []
        return TaskScore(
            points=sum(marks),
            out_of=len(marks),
            found=tuple(place * share for place, right in placed if right),
            lost=tuple(place * share for place, right in placed if not right),
            extra=self.extra(question, final_part(answer.text)),
        )

    @abstractmethod
    def write(self, rng: random.Random, index: int, num_sentences: int) -> ProseQuestion:
        """Write the example's prompt with this much filler; other parts must not depend on it."""

    @abstractmethod
    def mark(self, question: ProseQuestion, text: str) -> list[bool]:
        """Mark which parts of the answer are in the text."""

    def extra(self, question: ProseQuestion, text: str) -> Mapping[str, float]:
        return {}


def final_part(text: str) -> str:
    """Return the answer after a reasoning model's thoughts; all of it if there are none."""
    return text.rpartition(END_OF_THOUGHT)[2]
