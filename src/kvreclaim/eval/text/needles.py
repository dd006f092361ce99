"""Needles: codes said once each in a passage, all asked behind it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvreclaim.eval.text.codes import draw_facts, fact_text
from kvreclaim.eval.text.forced import ForcedTask, Quiz


@dataclass(frozen=True)
class Needles(ForcedTask):
    """Sentences "The access code of the {colour} {thing} is {code}." at random places, asked in random order
    in their own words. A verdict for each digit (token) of a code."""

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
    """A table of many lines "the {colour} {thing}: {code}" in one place of the passage; some are asked."""

    num_facts: int = 40
    num_asked: int = 8
    kind = "table"

    def write(self, rng: random.Random) -> Quiz:
        facts = draw_facts(rng, self.num_facts)
        asked = rng.sample(range(self.num_facts), self.num_asked)
        return Quiz(
            [f"\n{name}: {code}" for name, code in facts],
            [(f"\n{facts[i][0]}: ", facts[i][1], i) for i in asked],
            together=True,
        )


@dataclass(frozen=True)
class Assignments(ForcedTask):
    """Variables that get a number, and others that get those; what the latter hold is asked, so that two
    sentences far from each other have to be found. Evidence: where the number stands."""

    num_chains: int = 6
    kind = "assignments"

    def write(self, rng: random.Random) -> Quiz:
        facts = draw_facts(rng, 2 * self.num_chains)
        first, second = facts[: self.num_chains], facts[self.num_chains :]
        said = [fact_text(*fact) for fact in first]
        said += [
            f"The access code of {b} is that of {a}." for (a, _), (b, _) in zip(first, second, strict=True)
        ]
        order = rng.sample(range(len(said)), len(said))
        asked = rng.sample(range(self.num_chains), self.num_chains)
        return Quiz(
            [f" {said[i]}" for i in order],
            [(f"\nThe access code of {second[i][0]} is ", first[i][1], order.index(i)) for i in asked],
        )
