"""Unequal heads on vLLM's V2 model runner, under Triton's interpreter, scheduled both ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import interpreted  # before anything that imports Triton

# isort: split
import pytest
from engines import Engine
from models import random_prompts
from oracle import check_logprobs, passes_of
from uneven import check_mixed, compression


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def engine(request: pytest.FixtureRequest, tiny_model: Path, tiny_stats: Path) -> Iterator[Engine]:
    interpreted.use_v2_runner()
    made = Engine(
        tiny_model,
        compression={**compression(tiny_stats, budget=96, interval=32), "snapshots": True},
        num_blocks=60,
        chunk=128,
        batch=3,
        max_len=512,
        asynchronous=request.param == "asynchronous",
    )
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert isinstance(made.runner, GPUModelRunner)
    yield made
    made.close()


def test_logprobs_are_those_over_the_tokens_kept(engine: Engine, tiny_model: Path) -> None:
    check_mixed(engine, tiny_model, 3, (200, 160, 100, 150))


def test_the_next_turn_begins_with_a_snapshot(engine: Engine, tiny_model: Path) -> None:
    [prompt] = random_prompts((170,), seed=5)
    with engine.traced() as traces:
        [first] = engine.generate([prompt], 30)
        text = prompt + first.tokens
        [second] = engine.generate([text], 30)
    assert second.cached_tokens == (len(text) - 1) // 32 * 32
    passes = passes_of(traces, first.request_id)
    assert passes[-1].num_computed <= second.cached_tokens
    passes += passes_of(traces, second.request_id)
    check_logprobs(tiny_model, text, second.tokens, second.logprobs, passes)


def test_captures_and_dummy_batches_are_no_requests(engine: Engine, tiny_model: Path) -> None:
    [prompt] = random_prompts((200,), seed=4)
    with engine.traced() as traces:
        name = engine.add(prompt, 60)
        for _ in range(10):
            engine.step()
        assert engine.runner.reclaim.uneven.heads.rows
        for _ in range(3):
            engine.worker.execute_dummy_batch()
            engine.step()
        engine.run()
    answer = engine.answer(name)
    check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes_of(traces, name))


def test_nothing_is_left(engine: Engine) -> None:
    engine.generate([[1, 2, 3]], 1, settings="off")  # a worker learns of a request's end in the next step
    heads = engine.runner.reclaim.uneven.heads
    assert not heads.rows
    assert not heads.held
    assert not engine.runner.reclaim.positions.known
    assert engine.is_empty()
