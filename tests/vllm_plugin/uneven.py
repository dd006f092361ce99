"""Requests of every kind in one batch of an engine whose heads may keep unequal numbers of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import Engine
from models import random_prompts
from oracle import BF16, Kept, check_logprobs, full_logprobs, passes_of

POLICY = "shares(query_mixture)"
SETTINGS = {"policy": POLICY, "budget": 128, "interval": 64, "sinks": 4, "recent": 16}
OUTPUT = 120
MIXED: tuple[Any, ...] = (
    None,
    {"policy": "knorm"},
    "off",
    {"policy": "ada_kv(query_mixture)", "budget": 70, "interval": 30},
)


def compression(stats: Path, **more: Any) -> dict[str, Any]:
    """Settings that the engine is started with."""
    return {**SETTINGS, "stats": str(stats), **more}


def is_uneven(passes: list[Kept]) -> bool:
    """Whether some pass left heads with unequal numbers."""
    counts = [(kept.positions >= 0).sum(-1) for kept in passes]
    return any(int(each.max()) > int(each.min()) for each in counts)


def check_mixed(
    engine: Engine, model: Path, seed: int, lengths: tuple[int, ...] = (600, 450, 300, 400)
) -> None:
    """One request of each of MIXED, at once: each agrees with transformers with its own tokens dropped."""
    prompts = random_prompts(lengths, seed=seed)
    with engine.traced() as trace:
        names = [
            engine.add(prompt, OUTPUT, settings=settings)
            for prompt, settings in zip(prompts, MIXED, strict=True)
        ]
        engine.finish()
    uneven = []
    for name, prompt, settings in zip(names, prompts, MIXED, strict=True):
        answer, passes = engine.answer(name), passes_of(trace, name)
        if settings == "off":
            assert passes == []
            whole = full_logprobs(model, prompt, answer.tokens)
            assert float((whole - answer.logprobs).abs().mean()) <= BF16
            continue
        assert len(passes) >= 2
        check_logprobs(model, prompt, answer.tokens, answer.logprobs, passes)
        uneven.append(is_uneven(passes))
    assert uneven[:2] == [True, False]
    if hasattr(engine.engine.engine_core, "engine_core"):  # else the pool is in another process
        assert engine.is_empty()
