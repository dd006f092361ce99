"""Blocks freed by compression are the pool's: capacity, aborts, preemptions, prompts longer than the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engines import Answer, Engine, Watch
from models import random_prompts
from oracle import BF16, Kept, check_logprobs, full_logprobs, logprobs_with_drops, passes_of

CASE = {"policy": "streaming_llm", "budget": 256, "interval": 128}
TIGHT = {"budget": 128, "interval": 64, "sinks": 4, "recent": 32}
BLOCK = 32
POOL = 24


def serve_ten(model: Path, compression: dict[str, Any] | None) -> tuple[Watch, list[int]]:
    """10 requests of 800 + 400 tokens in a pool of 4,160. Returns also the blocks held after each pass."""
    engine = Engine(model, compression=compression, num_blocks=130, chunk=2048)
    after_passes: list[int] = []
    if compression is not None:
        pool, shrink = engine.scheduler.reclaim.pool, engine.scheduler.reclaim.pool.shrink

        def counted(plan: Any) -> Any:
            done = shrink(plan)
            after_passes.append(len(pool.table_state(plan.seq_id).block_ids))
            return done

        pool.shrink = counted
    for prompt in random_prompts([800] * 10, seed=1):
        engine.add(prompt, 400)
    watch = engine.run()
    assert engine.is_empty()
    engine.close()
    return watch, after_passes


@pytest.fixture(scope="module")
def whole(tiny_model: Path) -> Watch:
    """vLLM alone."""
    return serve_ten(tiny_model, None)[0]


@pytest.mark.parametrize("policy", ["streaming_llm", "shares(keydiff)"])
def test_ten_requests_that_do_not_fit_whole(tiny_model: Path, whole: Watch, policy: str) -> None:
    ours, after_passes = serve_ten(tiny_model, {**CASE, "policy": policy})
    assert whole.preemptions > 0
    assert ours.preemptions == 0
    assert whole.steps >= 2.5 * ours.steps
    assert max(ours.running) == 10
    budget, cap = 256 // BLOCK, (256 + 128) // BLOCK
    assert max(after_passes) <= budget + 1
    together = [used for used, running in zip(ours.used, ours.running, strict=True) if running == 10]
    assert max(together) <= 10 * cap
    assert min(together[10:]) <= 10 * (budget + 1)


@pytest.fixture(scope="module", params=["keydiff", "shares(keydiff)"])
def tight(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Engine]:
    """736 tokens for requests of up to 4096; heads that keep equally many tokens, and unequal ones."""
    compression = {**TIGHT, "policy": request.param}
    engine = Engine(tiny_model, compression=compression, num_blocks=POOL, chunk=128, max_len=4096)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of the tight engine leaves it empty at once, without an idle step."""
    yield
    if "tight" in request.fixturenames:
        engine = request.getfixturevalue("tight")
        assert engine.used_blocks() == 0
        assert not engine.scheduler.reclaim.records
        assert engine.is_empty()


def test_prompts_of_three_times_the_pool(tight: Engine, tiny_model: Path) -> None:
    prompts = random_prompts((2300, 2250), seed=2)
    with tight.traced() as trace:
        names = [tight.add(prompt, 60) for prompt in prompts]
        watch = tight.run()
    assert watch.preemptions == 0
    for name, prompt in zip(names, prompts, strict=True):
        assert len(prompt) >= 3 * (POOL - 1) * BLOCK
        answer = tight.answer(name)
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes_of(trace, name))
        assert answer.figures["kv_tokens"] <= 128 + 64
        assert answer.figures["tokens_evicted"] + answer.figures["kv_tokens"] == len(prompt) + 59


def test_compressed_requests_come_back_from_a_preemption(tight: Engine, tiny_model: Path) -> None:
    """The test takes every free block while all are compressed, until vLLM has preempted the last of them."""
    scheduler, pool = tight.scheduler, tight.pool
    taken: list[Any] = []
    last: list[Any] = []
    before: list[int] = []

    def starve() -> None:
        running = scheduler.running
        shifts = [scheduler.reclaim.records[request.request_id].account.num_evicted for request in running]
        if taken and len(running) < 3:
            before.append(last[0].num_output_tokens)
            pool.free_blocks(taken)
            taken.clear()
        elif taken or (not last and len(running) == 3 and all(shifts)):
            last[:] = [running[-1]]
            taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))

    prompts = random_prompts((300, 280, 350), seed=3)
    with tight.traced() as trace:
        names = [tight.add(prompt, 200) for prompt in prompts]
        watch = tight.run(after_step=starve)
    assert watch.preemptions == 1
    assert before[0] > 0
    for name, prompt in zip(names[:2], prompts[:2], strict=True):
        answer = tight.answer(name)
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes_of(trace, name))
    check_both_runs(tiny_model, prompts[2], tight.answer(names[2]), passes_of(trace, names[2]), before[0])


def check_both_runs(model: Path, prompt: list[int], answer: Answer, passes: list[Kept], at: int) -> None:
    """The passes before the preemption explain the output tokens before it, those after it the others."""
    again = next(n for n in range(1, len(passes)) if passes[n].num_computed <= passes[n - 1].num_computed)
    first = logprobs_with_drops(model, prompt, answer.tokens, passes[:again])
    second = logprobs_with_drops(model, prompt, answer.tokens, passes[again:])
    whole = full_logprobs(model, prompt, answer.tokens)
    assert len(answer.tokens) == 200
    assert (first[:at] - answer.logprobs[:at]).abs().mean() <= BF16
    assert (second[at:] - answer.logprobs[at:]).abs().mean() <= BF16
    assert (second[at:] - whole[at:]).abs().mean() > 1


def test_hits_that_fill_the_pool_leave_room_for_a_chunk(tight: Engine, tiny_model: Path) -> None:
    """22 of 23 blocks are in the prefix index; a longer prompt with this head gets 19 of them."""
    head, tail = random_prompts((704, 900), seed=4)
    tight.generate([head], 2, settings="off")
    with tight.traced() as trace:
        [answer] = tight.generate([head + tail], 80)
    assert answer.cached_tokens == (POOL - 1 - 128 // BLOCK) * BLOCK
    check_logprobs(
        tiny_model, head + tail, answer.tokens, answer.logprobs, passes_of(trace, answer.request_id)
    )


def test_abort_storm(tight: Engine) -> None:
    """200 requests, two thirds of them aborted at random moments: waiting, in the prompt, compressed."""
    random = Random(5)
    alive: list[str] = []
    aborted: set[str] = set()
    made = 0

    def stir() -> None:
        nonlocal made
        for _ in range(random.randrange(6)):
            if made < 200:
                [prompt] = random_prompts([random.randrange(1, 700)], seed=made)
                settings = "off" if len(prompt) < 300 and random.random() < 0.2 else None
                alive.append(tight.add(prompt, random.randrange(1, 120), settings=settings))
                made += 1
        for _ in range(random.randrange(4)):
            name = random.choice(alive)
            aborted.add(name)
            tight.abort([name])

    stir()
    tight.run(after_step=stir)
    assert made == 200
    assert len(aborted) > 50
    assert tight.runner.reclaim.rows.num_shifted == 0 or tight.scheduler.finished_req_ids
    for name in set(alive) - aborted:
        assert tight.answer(name).tokens
