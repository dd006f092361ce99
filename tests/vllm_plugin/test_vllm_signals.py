"""Policies that look at recent queries or at hidden states, inside vLLM: every pass keeps what our own
engine's compressor chooses of transformers' queries, keys, values and hidden states, and log-probabilities
are those of transformers with the others dropped. In fp32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from choices import check_choices, watched
from engines import Answer, Engine
from models import random_prompts
from oracle import Kept, check_logprobs, passes_of

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.model.loader import load_model

SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 16}
BLOCK, CHUNK = 32, 256
ROUNDED = 0.98
"""Scores are fp16, and what rounds to another number than with transformers ranks otherwise."""


PREFILL = "ada_kv(snapkv(when=prefill))"
POLICIES = {
    "shares(kvzap)": {"shares(kvzap)": 480, "kvzap": 480, "knorm": 480},
    PREFILL: {
        "ada_kv(snapkv)": 128,
        PREFILL: 416,
        "snapkv": 160,
        "tova": 480,
        "r_kv": 160,
        "segments(snapkv)": 160,
    },
    "kvzap": {"kvzap": 480, "keydiff": 480},
}
"""For each policy of the engine: policies that its requests may name, and what these hit of 500 tokens that
are in the prefix cache: so much that the queries that they look at before their first pass are computed."""


class World:
    """One engine, and compressors of the same settings for its model."""

    def __init__(self, model: Path, policy: str, stats: Path) -> None:
        self.model, self.policy, self.stats = model, policy, stats
        self.facts = load_model(model, dtype="float32", device="cpu").facts
        self.engine = Engine(
            model,
            compression={"policy": policy, "stats": str(stats), **SETTINGS},
            chunk=CHUNK,
            dtype="float32",
            asynchronous=policy == PREFILL,
        )
        self.compressor = lru_cache(self._compressor)

    def _compressor(self, policy: str) -> Compressor:
        config = CompressionConfig(policy=policy, stats=self.stats, **SETTINGS).in_blocks(BLOCK)
        return Compressor(config, self.facts)

    def check_passes(self, tokens: list[int], passes: list[Kept], policy: str) -> None:
        assert passes
        text = watched(self.model, tokens, passes)
        check_choices(text, self.compressor(policy), BLOCK, passes, ROUNDED if "kvzap" in policy else 1.0)

    def check(self, prompt: list[int], answer: Answer, passes: list[Kept], policy: str) -> None:
        self.check_passes([*prompt, *answer.tokens], passes, policy)
        check_logprobs(self.model, prompt, answer.tokens, answer.logprobs, passes)


@pytest.fixture(scope="module")
def zap_stats(tiny_model: Path) -> Path:
    """Statistics with weights of hidden states."""
    path = tiny_model.with_name("zap-stats.safetensors")
    loaded = load_model(tiny_model, dtype="float32", device="cpu")
    calibrate(loaded, random_prompts([512] * 3, seed=77), kvzap="linear").save(path)
    return path


@pytest.fixture(scope="module", params=POLICIES)
def world(request: pytest.FixtureRequest, tiny_model: Path, zap_stats: Path) -> Iterator[World]:
    world = World(tiny_model, request.param, zap_stats)
    yield world
    world.engine.close()


def test_passes_keep_what_our_own_engine_would(world: World) -> None:
    """Passes between chunks of a prompt and while output is made; requests of several policies at once."""
    prompts = random_prompts([600 - 40 * n for n in range(len(POLICIES[world.policy]))], seed=3)
    with world.engine.traced() as trace:
        names = [
            world.engine.add(prompt, 120, settings={"policy": policy})
            for prompt, policy in zip(prompts, POLICIES[world.policy], strict=True)
        ]
        world.engine.finish()
    for name, prompt, policy in zip(names, prompts, POLICIES[world.policy], strict=True):
        world.check(prompt, world.engine.answer(name), passes_of(trace, name), policy)
    assert world.engine.is_empty()


def test_what_is_hit_has_its_scores(world: World) -> None:
    """Blocks that a request without compression has computed."""
    [prompt] = random_prompts([500], seed=4)
    world.engine.generate([prompt], 2, settings="off")
    for policy, cached in POLICIES[world.policy].items():
        with world.engine.traced() as trace:
            [answer] = world.engine.generate([prompt], 80, settings={"policy": policy})
        assert answer.cached_tokens == cached, policy
        world.check(prompt, answer, passes_of(trace, answer.request_id), policy)
    assert world.engine.is_empty()


def test_preempted_requests_gather_the_same_again(world: World) -> None:
    """The test takes every free block until the last of two compressed requests is preempted."""
    engine, policy = world.engine, next(iter(POLICIES[world.policy]))
    taken: list[Any] = []
    passed: list[int] = []

    def starve() -> None:
        running = engine.scheduler.running
        shifts = [engine.scheduler.reclaim.records[one.request_id].account.num_evicted for one in running]
        if taken and len(running) < 2:
            engine.pool.free_blocks(taken)
            taken.clear()
        elif taken or (not passed and len(shifts) == 2 and min(shifts) >= 2 * SETTINGS["budget"]):
            passed.append(1)
            taken.extend(engine.pool.get_new_blocks(engine.pool.get_num_free_blocks()))

    prompts = random_prompts((400, 350), seed=5)
    with engine.traced() as trace:
        names = [engine.add(prompt, 160, settings={"policy": policy}) for prompt in prompts]
        watch = engine.run(after_step=starve)
    assert watch.preemptions == 1
    world.check(prompts[0], engine.answer(names[0]), passes_of(trace, names[0]), policy)
    passes = passes_of(trace, names[1])
    again = next(n for n in range(1, len(passes)) if passes[n].num_computed <= passes[n - 1].num_computed)
    world.check_passes([*prompts[1], *engine.answer(names[1]).tokens], passes[again:], policy)
    assert engine.is_empty()
