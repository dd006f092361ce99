"""A task over random tokens for tests of the grid, and sizes that suit a tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tiny

from kvreclaim.eval import Answer, Item, Metric, TaskScore

SMALL = {"interval": 16, "sinks": 2, "recent": 8, "num_examples": 5, "batch_size": 2}
POLICIES = ["full", "knorm", "segments(knorm)"]


@dataclass(frozen=True)
class Guess:
    """Random tokens; a verdict for every third token of the second half, its evidence the token before it
    in the first half."""

    num_tokens: int = 160
    name: str = "guess"
    metric: Metric = Metric.ACCURACY
    seeded: bool = True
    compares: bool = False

    @property
    def identity(self) -> Mapping[str, object]:
        return {"num_tokens": self.num_tokens}

    def num_examples(self, wanted: int) -> int:
        return wanted

    def item(self, seed: int, index: int) -> Item:
        length = self.num_tokens + index  # examples of several lengths
        (tokens,) = tiny.prompts((length,), seed=1000 * seed + index)
        return Item(tuple(tokens[: length // 2]), tuple(tokens[length // 2 :]))

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        places = range(0, len(item.continuation), 3)
        right = [answer.predicted[i] % 4 == item.continuation[i] % 4 for i in places]
        found = tuple(i / item.num_tokens for i, ok in zip(places, right, strict=True) if ok)
        lost = tuple(i / item.num_tokens for i, ok in zip(places, right, strict=True) if not ok)
        return TaskScore(sum(right), len(right), found, lost)
