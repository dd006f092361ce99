"""Checks of engines with several cache groups, whatever the other groups hold, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import Engine
from models import random_prompts
from oracle import passes_of
from uneven import is_uneven
from windowed import check_windowed


def check_batch(engine: Engine, model: Path, wanted: Sequence[Any], num_compressed: int) -> list[bool]:
    """Requests one beside another, by these settings each. num_compressed: layers.

    Returns: whether heads kept unequal numbers, of each request.
    """
    prompts = random_prompts((600, 450, 400), seed=1)
    with engine.traced() as trace:
        names = [
            engine.add(prompt, 100, settings=extra) for prompt, extra in zip(prompts, wanted, strict=True)
        ]
        engine.run()
    uneven = []
    for name, prompt, extra in zip(names, prompts, wanted, strict=True):
        answer, passes = engine.answer(name), passes_of(trace, name)
        assert all(len(kept.positions) == num_compressed for kept in passes)
        assert not passes if extra == "off" else len(passes) >= 3
        check_windowed(model, prompt, answer, passes)
        uneven.append(is_uneven(passes))
    return uneven


def check_conversation(engine: Engine, model: Path, hits: tuple[int, int]) -> None:
    """A conversation is sent again, compressed and not. In no group a block of a compressed request comes to
    the prefix cache. hits: tokens that the two find there."""
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
        first_answer = engine.answer(first)
        text = prompt + first_answer.tokens
        again = engine.add(text, 40)
        engine.run(after_step=look)
        whole = engine.add(text, 40, settings="off")
        engine.run(after_step=look)
    assert first_answer.figures["compactions"] > 1
    check_windowed(model, prompt, first_answer, passes_of(trace, first))
    for name, hit in zip((again, whole), hits, strict=True):
        answer = engine.answer(name)
        assert answer.cached_tokens == hit
        check_windowed(model, text, answer, passes_of(trace, name))
    assert len(hashed) == 2


def _hashed(engine: Engine, name: str) -> set[int]:
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    blocks = [block for each in managers for block in each.req_to_blocks[name] if not block.is_null]
    return {block.block_id for block in blocks if block.block_hash is not None}


def check_preemption(engine: Engine, model: Path) -> None:
    """The test takes every free block while two requests are compressed, until vLLM has preempted the last
    one."""
    scheduler, pool = engine.scheduler, engine.pool
    taken: list[Any] = []
    last: list[Any] = []
    before: list[tuple[int, int]] = []

    def starve() -> None:
        running = scheduler.running
        if taken and len(running) < 2:
            record = scheduler.reclaim.records[last[0].request_id]
            before.append((last[0].num_output_tokens, record.counts.compactions))
            pool.free_blocks(taken)
            taken.clear()
        elif taken or (
            not last
            and len(running) == 2
            and all(scheduler.reclaim.is_compressed(request.request_id) for request in running)
            and min(request.num_output_tokens for request in running) >= 10
        ):
            last[:] = [running[-1]]
            taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))

    prompts = random_prompts((300, 350), seed=7)
    with engine.traced() as trace:
        names = [engine.add(prompt, 150) for prompt in prompts]
        watch = engine.run(after_step=starve)
    assert watch.preemptions == 1
    first, passes = engine.answer(names[0]), passes_of(trace, names[1])
    check_windowed(model, prompts[0], first, passes_of(trace, names[0]))
    [(at, again)], answer = before, engine.answer(names[1])
    check_windowed(model, prompts[1], answer, passes[:again], slice(at))
    check_windowed(model, prompts[1], answer, passes[again:], slice(at, None))
