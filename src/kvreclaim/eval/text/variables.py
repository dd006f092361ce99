"""Variable tracking: the variables that hold a value, through chains of assignments."""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass
from itertools import pairwise

from kvreclaim.eval.text.base import TextTask
from kvreclaim.eval.text.prose import ProseQuestion, framed, spread

_NAME = re.compile(r"\b[A-Z]{5}\b")


@dataclass(frozen=True)
class TextVariableTracking(TextTask):
    """num_chains chains X1 = number, X2 = X1, ... of num_hops assignments each, in order, spread over the
    prompt; all variables of one chain are queried. A part is correct if the answer names the variable.

    Source: RULER, arXiv 2404.06654 (variable tracking, string match). Evidence: the variable's assignment.
    """

    num_chains: int = 3
    num_hops: int = 4
    name = "variable_tracking"

    def write(self, rng: random.Random, index: int, num_sentences: int) -> ProseQuestion:
        length = self.num_hops + 1
        names = _draw_names(rng, self.num_chains * length)
        values = rng.sample(range(10_000, 100_000), self.num_chains)
        facts, depths = [], []
        for chain, value in enumerate(values):
            own = names[chain * length : (chain + 1) * length]
            facts += [f"VAR {own[0]} = {value}."]
            facts += [f"VAR {name} = VAR {before}." for before, name in pairwise(own)]
            depths += sorted(rng.random() for _ in own)
        story, places = spread(rng, facts, depths, num_sentences)
        head = "Read the text. Among its sentences are assignments of variables; follow them.\n\n"
        tail = f"\n\nWhich variables have the value {values[0]}? Answer with their names alone, all of them."
        text, evidence = framed(head, story, tail, places[:length])
        return ProseQuestion(text, tuple(names[:length]), evidence)

    def mark(self, question: ProseQuestion, text: str) -> list[bool]:
        found = set(_NAME.findall(text))
        return [name in found for name in question.answer]


def _draw_names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(names)
