"""Perplexity on running text. It does not see lost needles: never judge a policy by it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvreclaim.eval.task import Answer, Item, Metric, Outcome
from kvreclaim.eval.windows import TextWindows


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood over the second half of every window (teacher-forced); the
    first half is the prompt."""

    windows: TextWindows
    name: str = field(default="perplexity", init=False)
    metric: Metric = field(default=Metric.PERPLEXITY, init=False)
    seeded: bool = field(default=False, init=False)
    compares: bool = field(default=False, init=False)

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.windows.identity

    def num_examples(self, wanted: int) -> int:
        return self.windows.num_examples(wanted)

    def item(self, seed: int, index: int) -> Item:
        return self.windows.item(seed, index)

    def judge(self, item: Item, answer: Answer) -> Outcome:
        return Outcome(points=-sum(answer.logprobs), out_of=len(answer.logprobs))
