"""Heads that keep unequal numbers of tokens inside vLLM: log-probabilities are those of
transformers with exactly the same tokens dropped, and whole blocks come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engines import Engine, Engines
from models import random_prompts
from oracle import BF16, check_logprobs, logprobs_with_drops, passes_of
from uneven import is_uneven

from kvreclaim.compression.stats import QueryStats

SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 16}
OUTPUT = 160

CASES: dict[str, dict[str, Any]] = {
    "shares": {},
    "shares-floor": {"policy": "shares(knorm, floor=0.2)"},
    "ada_kv": {"policy": "ada_kv(keydiff)"},
    "ada_kv-protect_prompt": {"policy": "ada_kv(knorm)", "protect_prompt": True},
    "shares-query_mixture": {"policy": "shares(query_mixture)"},
    "smaller-budget": {"policy": "ada_kv(knorm)", "budget": 70, "interval": 33},
    "no-protected-tokens": {"policy": "pyramidkv(knorm)", "sinks": 0, "recent": 0},
    "equal": {"policy": "knorm"},
}
LEARNT: dict[str, dict[str, Any]] = {
    "shares": {},
    "shares-static": {"policy": "shares(surrogate, by=static)"},
    "shares-static-random": {"policy": "shares(random, by=static)"},
    "equal-surrogate": {"policy": "surrogate"},
    "equal-segments": {"policy": "segments(knorm)"},
    "shares-protect": {"policy": "shares(protect(knorm, first=40), by=static)"},
}
"""What calibration has learnt, and positions."""


@pytest.fixture(scope="module")
def engines(
    tiny_model: Path, tiny_stats: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Statistics whose static shares are given: those of a random model mean nothing."""
    stats = QueryStats.load(tiny_stats)
    assert stats.head_shares is not None
    shares = torch.full_like(stats.head_shares, 0.1)
    shares[0, 1], shares[1, 0] = 0.9, 0.4
    path = tmp_path_factory.mktemp("skewed") / "stats.safetensors"
    replace(stats, head_shares=shares).save(path)
    engines = Engines(tiny_model, stats=str(path), **SETTINGS)
    yield engines
    engines.close()


def check(engine: Engine, model: Path, name: str, settings: dict[str, Any], seed: int) -> None:
    """Two requests at once: passes in the prompt, between its chunks, and while output is made."""
    prompts = random_prompts([600, 500], seed=seed)
    with engine.traced() as trace:
        answers = engine.generate(prompts, OUTPUT, settings=settings or None)
    for prompt, answer in zip(prompts, answers, strict=True):
        passes = passes_of(trace, answer.request_id)
        assert sum(kept.num_computed < len(prompt) for kept in passes) >= 1
        check_logprobs(model, prompt, answer.tokens, answer.logprobs, passes)
        if name.startswith(("shares", "equal")):
            assert is_uneven(passes) is name.startswith("shares")
    assert engine.is_empty()


@pytest.mark.parametrize("name", CASES)
def test_logprobs_are_those_of_what_was_kept(engines: Engines, tiny_model: Path, name: str) -> None:
    engine = engines.having("shares(query_mixture)")
    check(engine, tiny_model, name, CASES[name], 20 + list(CASES).index(name))


@pytest.mark.parametrize("name", LEARNT)
def test_what_calibration_has_learnt(engines: Engines, tiny_model: Path, name: str) -> None:
    engine = engines.having("shares(surrogate, by=static)")
    check(engine, tiny_model, name, LEARNT[name], 40 + list(LEARNT).index(name))


WALKED: tuple[Any, ...] = (
    None,
    None,
    "off",
    {"policy": "knorm"},
    {"policy": "ada_kv(keydiff)", "budget": 64, "interval": 32},
    {"policy": "shares(knorm, floor=0.2)", "protect_prompt": True},
)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_walk(engines: Engines, tiny_model: Path, seed: int) -> None:
    """Requests of every kind that share heads of their prompts come, run beside each other, and are aborted;
    the finished ones have the log-probabilities of transformers with the same tokens dropped."""
    engine, rng = engines.having("shares(query_mixture)"), Random(seed)
    heads = random_prompts([320, 500], seed=seed)
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()

    def stir() -> None:
        if len(prompts) < 16 and rng.random() < 0.2:
            [tail] = random_prompts([rng.randrange(1, 200)], seed=1000 * seed + len(prompts))
            prompt = rng.choice(heads)[: rng.randrange(500)] + tail
            prompts[engine.add(prompt, rng.randrange(30, 100), settings=rng.choice(WALKED))] = prompt
        if rng.random() < 0.03:
            name = rng.choice(list(prompts))
            aborted.add(name)
            engine.abort([name])

    with engine.traced() as trace:
        while len(prompts) < 16:
            stir()
            engine.run(after_step=stir)
    checked = 0
    for name, prompt in prompts.items():
        if name in aborted:
            continue
        answer, passes = engine.answer(name), passes_of(trace, name)
        expected = logprobs_with_drops(tiny_model, prompt, answer.tokens, passes)
        assert float((answer.logprobs - expected).abs().mean()) <= BF16
        checked += bool(passes)
    assert checked >= 5
    assert engine.is_empty()
