"""Models with sliding windows: the full-attention layers are compressed, the windows stay vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from models import make_stats, random_prompts
from oracle import passes_of
from uneven import is_uneven
from vllm.exceptions import VLLMValidationError
from windowed import KINDS, check_windowed, make_gemma

from kvreclaim.integrations.vllm.groups import most_window_blocks

BLOCK, CHUNK, NUM_BLOCKS = 32, 128, 60
SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 32}
POLICIES = {"synchronous": "query_mixture", "asynchronous": "shares(query_mixture)"}
"""Heads that keep equally many tokens, and unequal ones; both by statistics."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("models") / "gemma")


@pytest.fixture(scope="module")
def stats(gemma: Path) -> Path:
    return make_stats(gemma, gemma.with_name("stats.safetensors"))


@pytest.fixture(scope="module", params=POLICIES)
def engine(request: pytest.FixtureRequest, gemma: Path, stats: Path) -> Iterator[Engine]:
    """With prefix caching."""
    engine = Engine(
        gemma,
        compression={**SETTINGS, "policy": POLICIES[request.param], "stats": str(stats)},
        num_blocks=NUM_BLOCKS,
        chunk=CHUNK,
        max_len=8192,
        asynchronous=request.param == "asynchronous",
        dtype="float32",
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def empty(engine: Engine) -> Iterator[None]:
    """No test hits what another one left."""
    yield
    assert engine.is_empty()


def is_asynchronous(engine: Engine) -> bool:
    return bool(engine.config.scheduler_config.async_scheduling)


def test_logprobs_are_those_of_the_tokens_kept_in_full_layers(engine: Engine, gemma: Path) -> None:
    """Beside requests by the engine's policy one by another, and one that is not compressed."""
    prompts, wanted = random_prompts((600, 450, 400), seed=1), (None, {"policy": "keydiff"}, "off")
    with engine.traced() as trace:
        names = [
            engine.add(prompt, 100, settings=asked) for prompt, asked in zip(prompts, wanted, strict=True)
        ]
        engine.run()
    uneven = []
    for name, prompt, asked in zip(names, prompts, wanted, strict=True):
        answer, passes = engine.answer(name), passes_of(trace, name)
        assert all(len(kept.positions) == KINDS.count("full_attention") for kept in passes)
        assert not passes if asked == "off" else len(passes) >= 3
        check_windowed(gemma, prompt, answer, passes)
        uneven.append(is_uneven(passes))
    assert uneven == [is_asynchronous(engine), False, False]


def test_many_requests_hold_their_budgets_and_their_windows(engine: Engine) -> None:
    one = engine.add(random_prompts((1800,), seed=2)[0], 20)
    watch = engine.run()
    assert engine.answer(one).figures["tokens_evicted"] > 1500
    assert max(watch.used) <= engine.scheduler.reclaim.most_blocks(2048)
    names = [engine.add(prompt, 100) for prompt in random_prompts((500,) * 4, seed=3)]
    assert max(engine.run().running) >= 2
    assert all(engine.answer(name).figures["tokens_evicted"] > 300 for name in names)


def test_a_prompt_three_times_the_pool(engine: Engine) -> None:
    [prompt] = random_prompts([3 * NUM_BLOCKS * BLOCK], seed=4)
    name = engine.add(prompt, 20)
    watch = engine.run()
    answer = engine.answer(name)
    assert len(answer.tokens) == 20
    assert answer.figures["tokens_evicted"] + answer.figures["kv_tokens"] == len(prompt) + 19
    assert max(watch.used) <= engine.scheduler.reclaim.most_blocks(8192)


def test_what_is_computed_before_the_first_pass_is_hit_and_nothing_else(engine: Engine, gemma: Path) -> None:
    """A conversation is sent again, compressed and not. In no group a block of a compressed request comes to
    the prefix cache."""
    [prompt] = random_prompts([400], seed=5)
    hashed: dict[str, set[int]] = {}

    def look() -> None:
        for request in engine.scheduler.running:
            name = request.request_id
            if engine.scheduler.reclaim.is_compressed(name):
                now = _hashed(engine, name)
                assert now <= hashed.setdefault(name, now)

    with engine.traced() as trace:
        first = engine.add(prompt, 100)
        engine.run(after_step=look)
        said = engine.answer(first)
        text = prompt + said.tokens
        again = engine.add(text, 40)
        engine.run(after_step=look)
        whole = engine.add(text, 40, settings="off")
        engine.run(after_step=look)
    assert said.figures["compactions"] > 1
    check_windowed(gemma, prompt, said, passes_of(trace, first))
    # The second chunk makes the first pass due. Over a hit as long as that one chunk more is exact.
    for name, hit in ((again, 2 * CHUNK), (whole, 3 * CHUNK)):
        answer = engine.answer(name)
        assert answer.cached_tokens == hit
        check_windowed(gemma, text, answer, passes_of(trace, name))
    assert len(hashed) == 2


def _hashed(engine: Engine, name: str) -> set[int]:
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    blocks = [block for each in managers for block in each.req_to_blocks[name] if not block.is_null]
    return {block.block_id for block in blocks if block.block_hash is not None}


def test_compressed_requests_come_back_from_a_preemption(engine: Engine, gemma: Path) -> None:
    """Somebody takes every free block while both are compressed, until vLLM has preempted the last one."""
    scheduler, pool = engine.scheduler, engine.pool
    taken: list[Any] = []
    last: list[Any] = []
    said: list[int] = []

    def starve() -> None:
        running = scheduler.running
        if taken and len(running) < 2:
            said.append(last[0].num_output_tokens)
            pool.free_blocks(taken)
            taken.clear()
        elif taken or (
            not last
            and len(running) == 2
            and all(scheduler.reclaim.is_compressed(request.request_id) for request in running)
        ):
            last[:] = [running[-1]]
            taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))

    prompts = random_prompts((300, 350), seed=7)
    with engine.traced() as trace:
        names = [engine.add(prompt, 120) for prompt in prompts]
        watch = engine.run(after_step=starve)
    assert watch.preemptions == 1
    first, passes = engine.answer(names[0]), passes_of(trace, names[1])
    check_windowed(gemma, prompts[0], first, passes_of(trace, names[0]))
    again = next(n for n in range(1, len(passes)) if passes[n].num_computed <= passes[n - 1].num_computed)
    answer = engine.answer(names[1])
    check_windowed(gemma, prompts[1], answer, passes[:again], slice(said[0]))
    check_windowed(gemma, prompts[1], answer, passes[again:], slice(said[0], None))


def test_a_request_that_keeps_all_needs_room_for_its_windows_too(engine: Engine) -> None:
    """At the limit it is served; beyond it its prompt and windows would not fit, whoever waits for them."""
    room = (NUM_BLOCKS - 1 - most_window_blocks(engine.config)) * BLOCK
    prompt = random_prompts((room,), seed=8)[0]
    with pytest.raises(VLLMValidationError, match=f"keeps all its tokens.*holds {room};"):
        engine.add(prompt, 1, settings="off")
    name = engine.add(prompt[:-4], 4, settings="off")
    watch = engine.run()
    assert len(engine.answer(name).tokens) == 4
    assert watch.preemptions == 0
