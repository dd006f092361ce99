"""Needles: codes given once each in a passage, all queried after it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvreclaim.eval.text.codes import draw_facts, fact_text
from kvreclaim.eval.text.forced import ForcedTask, Quiz


@dataclass(frozen=True)
class Needles(ForcedTask):
    """Sentences "The access code of the {colour} {thing} is {code}." at random places, queried in random
    order in their own words. A verdict for each digit (token) of a code."""

    num_facts: int = 8
    kind = "needles"

    def write(self, rng: random.Random) -> Quiz:
        facts = draw_facts(rng, self.num_facts)
        order = rng.sample(range(self.num_facts), self.num_facts)
        return Quiz(
            [" " + fact_text(*fact) for fact in facts],
            [(f"\nThe access code of {facts[i][0]} is ", facts[i][1], i) for i in order],
        )


@dataclass(frozen=True)
class CodeTable(ForcedTask):
    """A table of many lines "the {colour} {thing}: {code}" in one place of the passage; some are queried."""

    num_facts: int = 40
    num_asked: int = 8
    kind = "table"

    def write(self, rng: random.Random) -> Quiz:
        facts = draw_facts(rng, self.num_facts)
        queries = rng.sample(range(self.num_facts), self.num_asked)
        return Quiz(
            [f"\n{name}: {code}" for name, code in facts],
            [(f"\n{facts[i][0]}: ", facts[i][1], i) for i in queries],
            together=True,
        )


@dataclass(frozen=True)
class Assignments(ForcedTask):
    """Variables that get a number, and others assigned from those; the latter are queried, so that two
    distant sentences are needed. Evidence: position of the number."""

    num_chains: int = 6
    kind = "assignments"

    def write(self, rng: random.Random) -> Quiz:
        facts = draw_facts(rng, 2 * self.num_chains)
        first, second = facts[: self.num_chains], facts[self.num_chains :]
        sentences = [fact_text(*fact) for fact in first]
        sentences += [
            f"The access code of {b} is that of {a}." for (a, _), (b, _) in zip(first, second, strict=True)
        ]
        order = rng.sample(range(len(sentences)), len(sentences))
        queries = rng.sample(range(self.num_chains), self.num_chains)
        return Quiz(
            [f" {sentences[i]}" for i in order],
            [(f"\nThe access code of {second[i][0]} is ", first[i][1], order.index(i)) for i in queries],
        )
