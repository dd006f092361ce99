"""Recall: codes of things, each given once among distractors that differ in one word."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import product

from kvreclaim.eval.text.base import TextTask
from kvreclaim.eval.text.prose import ProseQuestion, framed, spread

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey", "orange", "purple")
THINGS = ("lighthouse", "windmill", "tower", "bridge", "cabin", "chapel", "barn", "mill", "gate", "cellar")
ZONES = ((0.0, 0.1), (0.45, 0.55), (0.9, 1.0))
"""Depths of the queried fact: start, middle and end of the prompt, in turn."""
HEAD = "Read the text. It mentions access codes; remember them.\n\n"
_CODE = re.compile(r"\d+")


def draw_facts(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """(thing, code) pairs, both different from all others."""
    names = [f"the {colour} {thing}" for colour, thing in product(COLOURS, THINGS)]
    codes = rng.sample(range(100_000, 1_000_000), count)
    return list(zip(rng.sample(names, count), map(str, codes), strict=True))


def fact_text(name: str, code: str) -> str:
    return f"The access code of {name} is {code}."


@dataclass(frozen=True)
class TextRecall(TextTask):
    """One fact is queried; it is at the start, in the middle or at the end of the prompt, in turn.

    Correct if the first number of the answer is the code. Distractors: num_facts - 1 codes of other things.
    """

    num_facts: int = 12
    name = "recall"

    def write(self, rng: random.Random, index: int, num_sentences: int) -> ProseQuestion:
        facts = draw_facts(rng, self.num_facts)
        depths = [rng.uniform(*ZONES[index % len(ZONES)]), *(rng.random() for _ in facts[1:])]
        story, places = spread(rng, [fact_text(*fact) for fact in facts], depths, num_sentences)
        name, code = facts[0]
        tail = f"\n\nWhat is the access code of {name}? Answer with the code alone."
        text, evidence = framed(HEAD, story, tail, places[:1])
        return ProseQuestion(text, (code,), evidence)

    def mark(self, question: ProseQuestion, text: str) -> list[bool]:
        found = _CODE.search(text.replace(",", ""))
        return [found is not None and found.group() == question.answer[0]]


@dataclass(frozen=True)
class TextMultiQuery(TextTask):
    """Several of many facts are queried at once. A part is correct if the answer contains its code (RULER's
    string match, arXiv 2404.06654)."""

    num_facts: int = 16
    num_asked: int = 4
    name = "multi_query"

    def write(self, rng: random.Random, index: int, num_sentences: int) -> ProseQuestion:
        facts = draw_facts(rng, self.num_facts)
        depths = [rng.random() for _ in facts]
        story, places = spread(rng, [fact_text(*fact) for fact in facts], depths, num_sentences)
        queries = facts[: self.num_asked]
        names = "; ".join(name for name, _ in queries)
        tail = f"\n\nWhat are the access codes of these: {names}? Answer with one line `name: code` for each."
        text, evidence = framed(HEAD, story, tail, places[: self.num_asked])
        return ProseQuestion(text, tuple(code for _, code in queries), evidence)

    def mark(self, question: ProseQuestion, text: str) -> list[bool]:
        found = set(_CODE.findall(text))
        return [code in found for code in question.answer]
