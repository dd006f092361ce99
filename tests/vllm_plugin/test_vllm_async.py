"""The asynchronous scheduler: a step is planned while the one before it still runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine
from models import random_prompts
from oracle import check_logprobs, passes_of

SETTINGS = {"policy": "query_mixture", "budget": 128, "interval": 64, "sinks": 4, "recent": 32}
OUTPUT = 160
OF_REQUESTS: list[Any] = [
    None,
    {"policy": "streaming_llm"},
    {"policy": "keydiff", "budget": 70, "interval": 33},
    {"mode": "union", "protect_prompt": True},
]


def compression(stats: Path) -> dict[str, Any]:
    return {**SETTINGS, "stats": str(stats)}


@pytest.fixture(scope="module")
def engine(processes: None, tiny_model: Path, tiny_stats: Path) -> Iterator[Engine]:
    """In this process; made after the engine of other processes, since it freezes vLLM's environment."""
    engine = Engine(tiny_model, compression=compression(tiny_stats), asynchronous=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def processes(tiny_model: Path, tiny_stats: Path) -> None:
    """An engine core and a worker in processes of their own, where planning and computing really overlap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the trace holds tensors
        engine = Engine(tiny_model, compression=compression(tiny_stats), asynchronous=True)
        try:
            check_mixed(engine, tiny_model)
        finally:
            engine.close()


def check_mixed(engine: Engine, model: Path) -> None:
    """Requests with settings of their own, in one batch: each as with its own tokens dropped."""
    assert engine.config.scheduler_config.async_scheduling
    assert engine.config.scheduler_config.scheduler_cls.endswith(".AsyncReclaimScheduler")
    prompts = random_prompts((600, 450, 300, 120), seed=1)
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


def test_logprobs_across_processes(processes: None) -> None:
    """What the fixture checked."""


def test_logprobs_in_process(engine: Engine, tiny_model: Path) -> None:
    assert engine.core.batch_queue_size == 2
    check_mixed(engine, tiny_model)
    assert engine.is_empty()


def test_requests_that_stop_unforeseen(engine: Engine, tiny_model: Path) -> None:
    """A stop token is seen when the next step is planned already, at times with a pass for that request: its
    blocks come back, and who takes them says what it would say alone."""
    prompts = random_prompts((300, 260, 280, 270, 290), seed=7)
    first = engine.generate(prompts, OUTPUT)
    stops = [answer.tokens[40 + index] for index, answer in enumerate(first)]
    later = random_prompts((500, 480, 460), seed=8)
    with engine.traced() as trace:
        stopped = [engine.add(p, OUTPUT, stop=[t]) for p, t in zip(prompts, stops, strict=True)]
        after = [engine.add(prompt, OUTPUT) for prompt in later]
        watch = engine.run()
    assert watch.preemptions == 0
    for name, token in zip(stopped, stops, strict=True):
        tokens = engine.answer(name).tokens
        assert tokens[-1] == token
        assert token not in tokens[:-1]
    for name, prompt in zip(after, later, strict=True):
        answer = engine.answer(name)
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes_of(trace, name))
    assert engine.is_empty()


def test_the_same_as_synchronous(engine: Engine, tiny_model: Path, tiny_stats: Path) -> None:
    """A request alone is compressed at the same places, and says exactly the same."""
    [prompt] = random_prompts([600], seed=9)
    with engine.traced() as trace:
        [answer] = engine.generate([prompt], OUTPUT)
    passes = passes_of(trace, answer.request_id)
    engine.close()
    engine.__init__(tiny_model, compression=compression(tiny_stats))  # type: ignore[misc]
    assert engine.core.batch_queue_size == 1
    with engine.traced() as trace:
        [other] = engine.generate([prompt], OUTPUT)
    others = passes_of(trace, other.request_id)
    assert [kept.num_computed for kept in passes] == [kept.num_computed for kept in others]
    for kept, theirs in zip(passes, others, strict=True):
        assert torch.equal(kept.positions, theirs.positions)
    assert answer.tokens == other.tokens
    assert torch.equal(answer.logprobs, other.logprobs)
