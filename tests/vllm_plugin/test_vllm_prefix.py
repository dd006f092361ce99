"""Prefix caching beside compression: what was computed over the whole context is hit, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine
from models import random_prompts
from oracle import check_logprobs, passes_of

SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 32}
BLOCK, CHUNK, MANY = 32, 512, 300


def make_engine(model: Path, compression: dict[str, Any] | None, **more: Any) -> Engine:
    return Engine(model, compression=compression, num_blocks=MANY, chunk=CHUNK, **more)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[str, Answer]:
    """Answers of vLLM alone to the prompts of the siblings, each behind the one that they share blocks with:
    on some CPUs the last bits depend on how many tokens are computed at once."""
    engine = make_engine(tiny_model, None)
    answers = {}
    for name, prompt in siblings().items():
        engine.generate([siblings()["same"]], 150)
        [answers[name]] = engine.generate([prompt], 100)
        assert engine.is_empty()
    engine.close()
    return answers


@pytest.fixture(scope="module", params=["keydiff", "shares(keydiff)"])
def engine(request: pytest.FixtureRequest, plain: dict[str, Answer], tiny_model: Path) -> Iterator[Engine]:
    """Heads that keep equally many tokens, and unequal ones."""
    engine = make_engine(tiny_model, {**SETTINGS, "policy": request.param})
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def empty(engine: Engine) -> Iterator[None]:
    """No test hits what another one left."""
    yield
    assert engine.is_empty()


def siblings() -> dict[str, list[int]]:
    """Prompts with one head of 480 tokens, and one that goes on past the compressed one's."""
    head, first, second, third = random_prompts((480, 20, 70, 300), seed=1)
    return {"same": head + first, "short": head[:300], "other": head + second, "long": head + first + third}


def check(engine: Engine, model: Path, prompt: list[int], answer: Answer, trace: Any) -> None:
    check_logprobs(model, prompt, answer.tokens, answer.logprobs, passes_of(trace, answer.request_id))


def test_a_prompt_sent_again_hits_what_came_before_the_first_pass(engine: Engine, tiny_model: Path) -> None:
    [prompt] = random_prompts([700], seed=2)
    with engine.traced() as trace:
        [first] = engine.generate([prompt], 120)
        [again] = engine.generate([prompt], 120)
    assert (first.cached_tokens, again.cached_tokens) == (0, CHUNK)
    check(engine, tiny_model, prompt, first, trace)
    check(engine, tiny_model, prompt, again, trace)


def test_blocks_computed_after_a_pass_are_never_hit(engine: Engine, tiny_model: Path) -> None:
    """The whole conversation sent again: the prompt's blocks hit, those of the output do not."""
    [prompt] = random_prompts([400], seed=3)
    with engine.traced() as trace:
        [first] = engine.generate([prompt], 200)
        text = prompt + first.tokens
        [again] = engine.generate([text], 60)
        [off] = engine.generate([text], 60, settings="off")
    assert first.figures["compactions"] > 1
    full = len(prompt) // BLOCK * BLOCK
    assert again.cached_tokens == full
    assert off.cached_tokens >= full
    check(engine, tiny_model, prompt, first, trace)
    check(engine, tiny_model, text, again, trace)


@pytest.mark.parametrize("name", siblings())
def test_siblings_say_bit_for_bit_what_vllm_says(
    engine: Engine, plain: dict[str, Answer], tiny_model: Path, name: str
) -> None:
    """A sibling without compression comes after a compressed request and hits what that one left."""
    prompt = siblings()["same"]
    engine.generate([prompt], 150)
    [sibling] = engine.generate([siblings()[name]], 100, settings="off")
    assert sibling.cached_tokens == plain[name].cached_tokens >= 288
    assert sibling.figures == {}
    assert sibling.tokens == plain[name].tokens
    assert torch.equal(sibling.logprobs, plain[name].logprobs)


def test_siblings_that_run_beside_compressed_requests(engine: Engine, tiny_model: Path) -> None:
    """Shared blocks are never written: every log-probability is that of its own context."""
    prompts = siblings()
    with engine.traced() as trace:
        names = {name: engine.add(prompt, 100) for name, prompt in prompts.items()}
        engine.step()
        whole = {name: engine.add(prompt, 100, settings="off") for name, prompt in prompts.items()}
        engine.finish()
    for name, prompt in prompts.items():
        check(engine, tiny_model, prompt, engine.answer(names[name]), trace)
        answer = engine.answer(whole[name])
        assert answer.cached_tokens >= 288
        assert passes_of(trace, whole[name]) == []
        check_whole(tiny_model, prompt, answer)


def check_whole(model: Path, prompt: list[int], answer: Answer) -> None:
    from oracle import BF16, full_logprobs

    assert (full_logprobs(model, prompt, answer.tokens) - answer.logprobs).abs().mean() <= BF16


def test_a_hit_in_the_very_step_of_the_pass(engine: Engine, tiny_model: Path) -> None:
    """The step that compresses a request computes more of its prompt and admits siblings: the first of them
    hits the chunk before, not what is computed in this step; the second also what the first computes."""
    [prompt] = random_prompts([700], seed=5)
    with engine.traced() as trace:
        first = engine.add(prompt, 80)
        engine.step()
        whole, shrunk = engine.add(prompt, 80, settings="off"), engine.add(prompt, 80)
        passes = engine.scheduler.reclaim.totals.compactions
        engine.step()
        assert engine.scheduler.reclaim.totals.compactions == passes + 1
        assert len(engine.scheduler.running) == 3
        engine.finish()
    answers = {name: engine.answer(name) for name in (first, whole, shrunk)}
    assert answers[whole].cached_tokens == CHUNK
    assert answers[shrunk].cached_tokens == len(prompt) // BLOCK * BLOCK
    for name in (first, shrunk):
        check(engine, tiny_model, prompt, answers[name], trace)
    check_whole(tiny_model, prompt, answers[whole])
