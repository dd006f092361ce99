"""Turn N + 1 begins with what turn N has kept, in fp32: as if one request went on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine, greedy
from models import random_prompts
from oracle import Kept, full_logprobs, logprobs_with_drops, passes_of

SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 32, "snapshots": True}
BLOCK, POOL = 32, 60


@pytest.fixture(scope="module", params=["keydiff", "shares(protect(keydiff))"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Engine]:
    """Heads that keep equally many tokens, and unequal ones, whose policy asks for positions."""
    compression = {**SETTINGS, "policy": request.param}
    engine = Engine(tiny_model, compression=compression, num_blocks=POOL, dtype="float32")
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    """Every block comes back, and no test hits what another one left."""
    yield
    assert engine.used_blocks() == 0
    assert not engine.scheduler.reclaim.records
    assert engine.is_empty()


def check(model: Path, text: list[int], answer: Answer, passes: list[Kept]) -> None:
    """Log-probabilities are those of the tokens kept, and others than those of the full context."""
    wanted = logprobs_with_drops(model, text, answer.tokens, passes)
    torch.testing.assert_close(answer.logprobs, wanted, rtol=0, atol=2e-3)
    assert (wanted - full_logprobs(model, text, answer.tokens)).abs().mean() > 0.5


def before(passes: list[Kept], num_tokens: int) -> list[Kept]:
    """The passes as seen by a request that computes again what comes after so many tokens."""
    last = passes[-1]
    if last.num_computed <= num_tokens:
        return passes
    there = last.positions.where(last.positions < num_tokens, -1)
    return [*passes[:-1], Kept(num_tokens, there)]


def test_the_next_turn_goes_on(engine: Engine, tiny_model: Path) -> None:
    """The same tokens as of one request that runs through both turns; then a third turn, with new tokens."""
    [prompt, new] = random_prompts([300, 150], seed=2)
    with engine.traced() as trace:
        [whole] = engine.generate([prompt], 100)
        assert engine.engine.reset_prefix_cache()
        [first] = engine.generate([prompt], 40)
        text = prompt + whole.tokens[:50]
        [second] = engine.generate([text], 50)
        longer = text + second.tokens + new
        [third] = engine.generate([longer], 80)
    assert first.tokens == whole.tokens[:40]
    assert second.cached_tokens == (len(prompt) + 39) // BLOCK * BLOCK
    assert second.tokens == whole.tokens[50:]
    torch.testing.assert_close(second.logprobs, whole.logprobs[50:], rtol=0, atol=2e-3)
    assert third.cached_tokens == (len(text) + 49) // BLOCK * BLOCK
    turns = [passes_of(trace, answer.request_id) for answer in (first, second, third)]
    assert [kept.num_computed for kept in turns[0] + turns[1]] == [
        kept.num_computed for kept in passes_of(trace, whole.request_id)
    ]
    assert len(turns[2]) >= 2
    check(tiny_model, longer, third, before(turns[0] + turns[1], third.cached_tokens) + turns[2])
    assert engine.scheduler.reclaim.totals.snapshot_tokens >= second.cached_tokens + third.cached_tokens


def test_other_settings_salts_and_texts_find_nothing(engine: Engine) -> None:
    [prompt] = random_prompts([320], seed=3)
    [first] = engine.generate([prompt], 40)
    text, totals = prompt + first.tokens, engine.scheduler.reclaim.totals
    before = totals.snapshot_tokens
    for settings in ({"budget": 96}, {"sinks": 8}, "off"):
        engine.generate([text], 2, settings=settings)
    engine.generate([[*text[:10], text[10] ^ 1, *text[11:]]], 2)
    salted: dict[str, Any] = {"prompt_token_ids": text, "cache_salt": "another"}
    engine.engine.add_request("salted", salted, greedy(2))
    engine.finish()
    assert engine.answer("salted").cached_tokens == 0
    assert totals.snapshot_tokens == before


def test_who_needs_blocks_gets_them(engine: Engine, tiny_model: Path) -> None:
    """Others take the whole pool: the snapshot is gone, and the next turn is computed."""
    prompt, *others = random_prompts([300, 600, 600, 600], seed=4)
    [first] = engine.generate([prompt], 40)
    engine.generate(others, 60, settings="off")
    text = prompt + first.tokens
    with engine.traced() as trace:
        [second] = engine.generate([text], 40)
    assert second.cached_tokens == 0
    check(tiny_model, text, second, passes_of(trace, second.request_id))


def test_after_an_abort(engine: Engine, tiny_model: Path) -> None:
    """Tokens that an aborted request kept are there for the same prompt, and its blocks are free."""
    [prompt] = random_prompts([500], seed=5)
    with engine.traced() as trace:
        name = engine.add(prompt, 200)
        while len(engine.runner.reclaim.trace.passes) < 4:
            engine.step()
        [request] = engine.scheduler.running
        text = list(request.all_token_ids)
        engine.abort([name])
        assert engine.used_blocks() == 0
        [second] = engine.generate([text], 60)
    passes = passes_of(trace, name), passes_of(trace, second.request_id)
    assert second.cached_tokens > 500
    check(tiny_model, text, second, before(passes[0], second.cached_tokens) + passes[1])


def test_preempted_requests_go_on_where_they_were(engine: Engine, tiny_model: Path) -> None:
    """The test takes every free block until the last request is preempted, and gives them back."""
    pool, scheduler = engine.pool, engine.scheduler
    prompts = random_prompts([300, 280], seed=6)
    with engine.traced() as trace:
        names = [engine.add(prompt, 120) for prompt in prompts]
        taken: list[Any] = []

        def starve() -> None:
            running = scheduler.running
            if taken and len(running) < 2:
                pool.free_blocks(taken)
                taken.clear()
            elif not taken and len(running) == 2 and running[-1].num_output_tokens == 30:
                taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))

        watch = engine.run(after_step=starve)
    assert watch.preemptions == 1
    for name, prompt in zip(names, prompts, strict=True):
        answer = engine.answer(name)
        check(tiny_model, prompt, answer, passes_of(trace, name))
