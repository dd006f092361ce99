"""What `kvreclaim bench vllm` sends: the load of each case, and its prompts in turns.

Answers are judged if the prompts are look-ups: a question with a known answer follows a document, and an
answer is correct if it begins with it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreclaim.bench.plans import VllmPlan
from kvreclaim.calibrate.lookups import lookup_documents
from kvreclaim.corpora import code, prose

CODE = 200_000
"""Characters of Python after the English."""
KINDS, FACTS_SHARE, QUESTION = ("sentences", "records"), 0.2, 32
"""Question types of look-ups; share of facts in a document; tokens reserved for the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    """The load on each server in a turn.

    prompt:         tokens; vLLM's client takes at most 1,024 of a text
    output, spread: tokens of an answer, from output * (1 - spread) to output * (1 + spread)
    num_blocks:     as vLLM's --num-gpu-blocks-override, one of them its null block
    budget:         tokens that the plugin keeps; None: the plan's
    at_once:        all requests are sent at once, instead of at the plan's rate
    is_ample:       the pool holds all requests whole; prefix caching is then off, as it would share prompts
                    between turns
    """

    requests: int = 12
    prompt: int = 512
    output: int = 768
    spread: float = 0.33
    num_blocks: int = 129
    chunk: int = 512
    budget: int | None = None
    at_once: bool = False
    is_ample: bool = False

    @property
    def longest(self) -> int:
        return self.prompt + round(self.output * (1 + self.spread)) + 32  # what text and tokens differ by


ALL_AT_ONCE: dict[str, Any] = {"spread": 0.0, "chunk": 2048, "at_once": True}
LOOKUPS = ServeLoad(requests=16, prompt=992, output=128, spread=0.0, num_blocks=97)
LOADS = {
    "small": ServeLoad(requests=10, prompt=800, output=400, num_blocks=130, budget=256, **ALL_AT_ONCE),
    "large": ServeLoad(requests=32, prompt=2048, output=2048, num_blocks=769, budget=512, **ALL_AT_ONCE),
    "serve": ServeLoad(),
    "plenty": ServeLoad(num_blocks=12 * 50 + 1, is_ample=True),
}
"""By case. In `serve` memory is the limit; in `plenty` a request ends within 50 blocks."""


Prompts = tuple[Path | None, Sequence[str]]
"""A turn's file in ShareGPT's format, which vLLM's client reads without further packages, or None for random
tokens; and the correct answers in the file's order, if there are any."""


def judged(texts: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Return which texts begin with the correct answer."""
    pairs = zip(texts, answers, strict=True)
    return [re.match(rf"\s*{re.escape(right)}\b", text) is not None for text, right in pairs]


def make_prompts(plan: VllmPlan, load: ServeLoad, model: Path, folder: Path) -> list[Prompts]:
    """Make the client's prompts of each turn."""
    if plan.prompts == "random":
        return [(None, ())] * plan.turns
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if plan.prompts == "lookups":
        return _lookups(plan, load, tokenizer, folder)
    text = f"{prose().evaluation}\n\n{code().evaluation[:CODE]}"
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    rng, talks, at = random.Random(plan.seed), [], 0
    low, high = round(load.output * (1 - load.spread)), round(load.output * (1 + load.spread))
    while at + load.prompt + high <= len(ids):
        end = at + load.prompt + rng.randint(low, high)
        parts = ids[at : at + load.prompt], ids[at + load.prompt : end]
        talks.append(tuple(str(tokenizer.decode(part)) for part in parts))
        at = end
    return [(_written(folder / "text.json", talks), ())] * plan.turns


def _lookups(plan: VllmPlan, load: ServeLoad, tokenizer: Any, folder: Path) -> list[Prompts]:
    """Put one question after each document. The kinds alternate; no document is repeated."""
    ids = tokenizer(prose().evaluation, add_special_tokens=False, verbose=False).input_ids
    documents = lookup_documents(
        tokenizer,
        ids,
        count=plan.turns * load.requests,
        num_tokens=load.prompt - QUESTION,
        seed=plan.seed,
        kinds=KINDS,
        facts_share=FACTS_SHARE,
    )
    rng, talks = random.Random(plan.seed), []
    for number, document in enumerate(documents):
        kind = KINDS[number % len(KINDS)]
        one = rng.choice([each for each in document.questions if each.kind == kind])
        talks.append((tokenizer.decode(document.prompt + one.question), tokenizer.decode(one.answer).strip()))
    rng.shuffle(talks)  # windows of the text that begin together overlap
    made: list[Prompts] = []
    for number in range(plan.turns):
        own = talks[number * load.requests : (number + 1) * load.requests]
        file = _written(folder / f"{number}.json", own)
        made.append((file, [answer for _, answer in own]))
    return made


def _written(file: Path, talks: Sequence[Sequence[str]]) -> Path:
    entries = [{"conversations": [{"value": turn} for turn in talk]} for talk in talks]
    file.write_text(json.dumps(entries), encoding="utf-8")
    return file
