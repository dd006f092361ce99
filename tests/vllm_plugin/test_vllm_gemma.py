"""A real model with sliding windows; GEMMA is its directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engines import Engine
from oracle import passes_of
from transformers import AutoTokenizer
from windowed import check_windowed

GEMMA = os.environ.get("GEMMA", "")


@pytest.mark.skipif(not GEMMA, reason="set GEMMA to the directory of a Gemma 3")
@pytest.mark.parametrize("policy", ["auto", "shares(surrogate)"])
def test_logprobs_are_those_of_the_tokens_kept_in_full_layers(policy: str) -> None:
    """The first time, without statistics, the model is calibrated."""
    settings = {"policy": policy, "budget": 256, "interval": 64, "sinks": 4, "recent": 32}
    engine = Engine(Path(GEMMA), compression=settings, num_blocks=200, chunk=512, dtype="float32")
    text = Path(__file__).parents[2].joinpath("docs", "vllm.md").read_text(encoding="utf-8")
    prompt = AutoTokenizer.from_pretrained(GEMMA)(text).input_ids[:900]
    with engine.traced() as trace:
        first = engine.add(prompt, 100)
        engine.run()
        names = [first, engine.add(prompt, 100), engine.add(prompt, 20, settings="off")]
        engine.run()
    answers = [engine.answer(name) for name in names]
    assert answers[0].figures["compactions"] >= 2
    assert [answer.cached_tokens > 0 for answer in answers] == [False, True, True]
    for answer in answers:
        check_windowed(Path(GEMMA), prompt, answer, passes_of(trace, answer.request_id))
    assert engine.is_empty()
    engine.close()
