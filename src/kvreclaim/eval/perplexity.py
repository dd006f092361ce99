"""Perplexity on running text. It does not see lost needles: never judge a policy by it alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.eval.task import Answer, Item, Metric, Outcome
from kvreclaim.eval.windows import WindowTask


@dataclass(frozen=True)
class Perplexity(WindowTask):
    """exp of the mean negative log-likelihood over the second half of every window (teacher-forced); the
    first half is the prompt."""

    name = "perplexity"
    metric = Metric.PERPLEXITY

    def judge(self, item: Item, answer: Answer) -> Outcome:
        return Outcome(points=-sum(answer.logprobs), out_of=len(answer.logprobs))
