"""Write the prompts that the page offers: tasks of the demo model, and a text for other models.

    .venv/bin/python scripts/page_examples.py

An entry has prompt, answer (what is right), max_tokens, budget and a title.
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
DEMO_BUDGET, TEXT_BUDGET = 256, 512
NUM_SENTENCES, NUM_CODES = 150, 12


def build() -> dict[str, list[dict[str, Any]]]:
    """The file's content."""
    decode = LLM(demo_model(), num_blocks=16).tokenizer.decode
    demo = []
    for task, num_tokens, seed, title in DEMO:
        example = DEMO_TASKS[task].make(num_tokens).sample(seed)
        answer = decode(list(example.trace[:-1]))  # the last token ends the text
        demo.append(_entry(title, decode(list(example.prompt)), answer, len(example.trace), DEMO_BUDGET))
    return {"demo": demo, "text": [_text()]}


def _text() -> dict[str, Any]:
    rng = random.Random("page")
    facts = draw_facts(rng, NUM_CODES)
    depths = [0.5, *(rng.random() for _ in facts[1:])]
    story, places = spread(rng, [fact_text(*fact) for fact in facts], depths, NUM_SENTENCES)
    name, code = facts[0]
    tail = f"\n\nQuestion: what is the access code of {name}? Answer: the access code of {name} is"
    prompt = framed(HEAD, story, tail, places[:1])[0]
    return _entry("an access code among eleven others", prompt, code, 16, TEXT_BUDGET)


def _entry(title: str, prompt: str, answer: str, max_tokens: int, budget: int) -> dict[str, Any]:
    return {"title": title, "prompt": prompt, "answer": answer, "max_tokens": max_tokens, "budget": budget}


if __name__ == "__main__":
    TARGET.write_text(json.dumps(build(), indent=1) + "\n")
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes")
