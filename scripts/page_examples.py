"""Write the prompts that the page offers: tasks of the demo model, and texts for other models.

    .venv/bin/python scripts/page_examples.py

An entry has prompt, max_tokens, budget and a title; the demo model's have the right answer, the others what a
right answer contains.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from kvreclaim import LLM, demo_model
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.text.codes import HEAD, draw_facts, fact_text
from kvreclaim.eval.text.prose import framed, spread

TARGET = Path(__file__).parents[1] / "src/kvreclaim/server/page/examples.json"
DEMO = (
    ("multi_query", 2048, 2, "questions about facts that stand far back"),
    ("variable_tracking", 2048, 2, "variables followed through chains of assignments"),
    ("multi_query", 2048, 3, "other facts, other questions"),
)
"""(task, tokens, seed, title); the demo model answers them with a tenth of its cache."""
TEXTS = ((1, 80, 6, "page"), (4, 100, 4, "c"), (6, 120, 6, "c"), (12, 150, 6, "page"))
"""(codes, sentences, digits, seed), the easiest first."""
DEMO_BUDGET, TEXT_BUDGET = 256, 384


def build() -> dict[str, list[dict[str, Any]]]:
    """The file's content."""
    decode = LLM(demo_model(), num_blocks=16).tokenizer.decode
    demo = []
    for task, num_tokens, seed, title in DEMO:
        example = DEMO_TASKS[task].make(num_tokens).sample(seed)
        answer = decode(list(example.trace[:-1]))  # the last token ends the text
        entry = _entry(title, decode(list(example.prompt)), len(example.trace), DEMO_BUDGET)
        demo.append(entry | {"answer": answer})
    return {"demo": demo, "text": [_text(*text) for text in TEXTS]}


def _text(num_codes: int, num_sentences: int, num_digits: int, seed: str) -> dict[str, Any]:
    rng = random.Random(seed)
    facts = [(name, code[:num_digits]) for name, code in draw_facts(rng, num_codes)]
    depths = [0.5, *(rng.random() for _ in facts[1:])]
    story, places = spread(rng, [fact_text(*fact) for fact in facts], depths, num_sentences)
    name, code = facts[0]
    tail = f"\n\nWhat is the access code of {name}? Answer with the sentence that says it."
    codes = f"{num_codes} access codes" if num_codes > 1 else "one access code"
    title = f"{codes} in {num_sentences} sentences"
    return _entry(title, framed(HEAD, story, tail, places[:1])[0], 40, TEXT_BUDGET) | {"contains": code}


def _entry(title: str, prompt: str, max_tokens: int, budget: int) -> dict[str, Any]:
    return {"title": title, "prompt": prompt, "max_tokens": max_tokens, "budget": budget}


if __name__ == "__main__":
    TARGET.write_text(json.dumps(build(), indent=1) + "\n")
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes")
