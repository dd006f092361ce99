"""The asynchronous scheduler: a step is planned while the one before it still runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine
from models import VOCAB_SIZE, random_prompts
from oracle import Kept, check_logprobs, passes_of

SETTINGS = {"policy": "query_mixture", "budget": 128, "interval": 64, "sinks": 4, "recent": 32}
OUTPUT = 160
EVEN, STOPS = range(0, VOCAB_SIZE, 2), {0: 100.0}
OF_REQUESTS: list[Any] = [
    None,
    {"policy": "streaming_llm"},
    {"policy": "keydiff", "budget": 70, "interval": 33},
    {"mode": "union", "protect_prompt": True},
]


def compression(stats: Path) -> dict[str, Any]:
    return {**SETTINGS, "stats": str(stats)}


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tiny_stats: Path) -> tuple[list[int], Answer, list[Kept]]:
    """A prompt, and what vLLM's synchronous scheduler makes of it alone."""
    [prompt] = random_prompts([600], seed=9)
    engine = Engine(tiny_model, compression=compression(tiny_stats))
    assert engine.core.batch_queue_size == 1
    with engine.traced() as trace:
        [answer] = engine.generate([prompt], OUTPUT)
    engine.close()
    return prompt, answer, passes_of(trace, answer.request_id)


@pytest.fixture(scope="module")
def engine(alone: Any, tiny_model: Path, tiny_stats: Path) -> Iterator[Engine]:
    """An engine in this process, after that of `alone` is gone."""
    engine = Engine(tiny_model, compression=compression(tiny_stats), asynchronous=True)
    assert engine.core.batch_queue_size == 2
    yield engine
    engine.close()


def check_mixed(engine: Engine, model: Path) -> None:
    """Requests with settings of their own, in one batch: each as with its own tokens dropped."""
    assert engine.config.scheduler_config.async_scheduling
    assert engine.config.scheduler_config.scheduler_cls.endswith(".AsyncReclaimScheduler")
    prompts = random_prompts((600, 450, 500, 400), seed=1)
    with engine.traced() as trace:
        names = [
            engine.add(prompt, OUTPUT, settings=settings)
            for prompt, settings in zip(prompts, OF_REQUESTS, strict=True)
        ]
        engine.finish()
    for name, prompt in zip(names, prompts, strict=True):
        answer, passes = engine.answer(name), passes_of(trace, name)
        assert len(passes) >= 2
        check_logprobs(model, prompt, answer.tokens, answer.logprobs, passes)


def test_logprobs_in_process(engine: Engine, tiny_model: Path) -> None:
    check_mixed(engine, tiny_model)
    assert engine.is_empty()


def test_requests_that_stop_unforeseen(engine: Engine, tiny_model: Path) -> None:
    """A stop token is seen when the next step is planned already, here with a pass for that very request: its
    blocks come back, and a request that takes them gets the answer it gets alone. Every other request is
    made to stop there."""
    length, due = 100, SETTINGS["budget"] + SETTINGS["interval"]
    last = due - length + 1  # the token that makes its request due
    prompts, later = random_prompts([length] * 10, seed=7), random_prompts((500, 480, 460), seed=8)
    with engine.traced() as trace:
        stopped = [
            engine.add(prompt, OUTPUT, stop=EVEN, min_tokens=last - 1, logit_bias=bias)
            for prompt, bias in zip(prompts, [STOPS, None] * 5, strict=True)
        ]
        after = [engine.add(prompt, OUTPUT) for prompt in later]
        watch = engine.run()
    assert watch.preemptions == 0
    in_vain = []
    for name in stopped:
        tokens = engine.answer(name).tokens
        assert len(tokens) >= last
        assert all(token % 2 for token in tokens[:-1])
        passes = passes_of(trace, name)
        in_vain.append(bool(passes) and passes[-1].num_computed == length + len(tokens) - 1)
    assert all(in_vain[::2]), "a request did not stop when a pass was planned for it"
    for name, prompt in zip(after, later, strict=True):
        answer = engine.answer(name)
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes_of(trace, name))
    assert engine.is_empty()


def test_the_same_as_synchronous(engine: Engine, alone: tuple[list[int], Answer, list[Kept]]) -> None:
    """A request alone is compressed at the same places, and gets exactly the same tokens."""
    prompt, expected, expected_passes = alone
    with engine.traced() as trace:
        [answer] = engine.generate([prompt], OUTPUT)
    passes = passes_of(trace, answer.request_id)
    assert len(passes) >= 4
    for kept, other in zip(passes, expected_passes, strict=True):
        assert kept.num_computed == other.num_computed
        assert torch.equal(kept.positions, other.positions)
    assert answer.tokens == expected.tokens
    assert torch.equal(answer.logprobs, expected.logprobs)
