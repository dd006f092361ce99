"""Heads that keep unequal numbers of tokens inside vLLM: what is said is what transformers says with exactly
the same tokens dropped, and whole blocks come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from models import random_prompts
from oracle import check_logprobs, passes_of

SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 16}
OUTPUT = 160

CASES: dict[str, dict[str, Any]] = {
    "shares": {},
    "shares-floor": {"policy": "shares(knorm, floor=0.3)"},
    "ada_kv": {"policy": "ada_kv(keydiff)"},
    "ada_kv-protect_prompt": {"policy": "ada_kv(knorm)", "protect_prompt": True},
    "shares-query_mixture": {"policy": "shares(query_mixture)"},
    "smaller-budget": {"policy": "ada_kv(knorm)", "budget": 70, "interval": 33},
    "equal": {"policy": "knorm"},
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tiny_stats: Path) -> Iterator[Engine]:
    settings = {"policy": "shares(query_mixture)", "stats": str(tiny_stats), **SETTINGS}
    engine = Engine(tiny_model, compression=settings)
    yield engine
    engine.close()


@pytest.mark.parametrize("name", CASES)
def test_logprobs_are_those_of_what_was_kept(engine: Engine, tiny_model: Path, name: str) -> None:
    """Two requests at once: passes in the prompt, between its chunks, and while output is made."""
    prompts = random_prompts([600, 500], seed=list(CASES).index(name) + 20)
    with engine.traced() as trace:
        answers = engine.generate(prompts, OUTPUT, settings=CASES[name] or None)
    for prompt, answer in zip(prompts, answers, strict=True):
        passes = passes_of(trace, answer.request_id)
        assert sum(kept.num_computed < len(prompt) for kept in passes) >= 1
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes)
        counts = [(kept.positions >= 0).sum(-1) for kept in passes]
        if name.startswith("shares"):
            assert any(int(each.max()) > int(each.min()) for each in counts), "heads are equal"
    assert engine.is_empty()
