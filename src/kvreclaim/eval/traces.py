"""Tasks scored by teacher forcing: gold traces of the demo tasks, and the model's own continuations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.demo_tasks import DEMO_TASKS, DemoTask
from kvreclaim.eval.example import Example, exact_match, progress
from kvreclaim.eval.passages import Passages
from kvreclaim.eval.task import SEED_STRIDE, Answer, Item, PlainTask, TaskScore
from kvreclaim.eval.vocabulary import TOKEN_IDS
from kvreclaim.sampling_params import SamplingParams


def knows_demo_vocabulary(vocabulary: Mapping[str, int]) -> bool:
    """Whether a tokenizer's words are the demo model's, with the same ids."""
    return bool(vocabulary) and vocabulary.items() <= TOKEN_IDS.items()


@dataclass(frozen=True)
class TraceTask(PlainTask):
    """One of DEMO_TASKS. A verdict for each token of the gold trace with far-away evidence: correct if it is
    the most likely one after the gold tokens before it. Evidence: the position it is read from."""

    name: str
    num_tokens: int

    def __post_init__(self) -> None:
        self._source().make(self.num_tokens)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"dialect": "demo", "num_tokens": self.num_tokens}

    def item(self, seed: int, index: int) -> Item:
        example: Example = self._source().make(self.num_tokens).sample(seed * SEED_STRIDE + index)
        return Item(example.prompt, example.trace, payload=example)

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        example: Example = item.payload
        judged = self._source().judged
        found: list[float] = []
        lost: list[float] = []
        right = total = 0
        columns = zip(example.trace, answer.predicted, example.kinds, example.evidence, strict=True)
        for gold, guess, kind, position in columns:
            if kind not in judged:
                continue
            total += 1
            right += gold == guess
            if position >= 0:
                (found if gold == guess else lost).append(position / item.num_tokens)
        return TaskScore(right, total, tuple(found), tuple(lost))

    def judge_free(self, item: Item, answer: Answer) -> Mapping[str, float]:
        """exact_match, and progress: the share of the trace before the first error."""
        return {
            "exact_match": float(exact_match(item.payload, answer.token_ids)),
            "progress": progress(item.payload, answer.token_ids),
        }

    def _source(self) -> DemoTask:
        return DEMO_TASKS[self.name]


TEMPERATURE = 0.7
"""Greedy traces of small models soon repeat."""


@dataclass(frozen=True)
class OwnTraces:
    """A passage of num_tokens / 2 tokens, continued by the model to num_tokens: sampled at TEMPERATURE, with
    the full cache, ignoring its end token."""

    llm: LLM = field(repr=False)
    passages: Passages = field(repr=False)
    num_tokens: int
    seeded = True
    _drawn: dict[int, Item] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"text": self.passages.digest, "own": TEMPERATURE, "num_tokens": self.num_tokens}

    def num_examples(self, wanted: int) -> int:
        return wanted

    def item(self, seed: int, index: int) -> Item:
        number = seed * SEED_STRIDE + index
        if number not in self._drawn:
            self._drawn[number] = self._draw(number)
        return self._drawn[number]

    def _draw(self, number: int) -> Item:
        prefix = self.passages.prefix
        prompt = [*prefix, *self.passages.window(number, self.num_tokens // 2 - len(prefix))]
        params = SamplingParams(
            temperature=TEMPERATURE,
            max_tokens=self.num_tokens - len(prompt),
            ignore_eos=True,
            seed=number,
        )
        (out,) = self.llm.generate([prompt], params)
        return Item(tuple(prompt), tuple(out.outputs[0].token_ids))
