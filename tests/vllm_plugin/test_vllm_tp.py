"""Two workers, each with half of the heads, choose what one worker chooses, and attend to what they kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine
from models import make_stats, make_tiny_model, random_prompts
from oracle import Kept, full_logprobs, logprobs_with_drops, passes_of

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.model.loader import load_model

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # read when an executor is made

BUDGET, INTERVAL = 128, 32
PROMPTS = random_prompts((600, 500), seed=3)
NUM_TOKENS = 80
MATTERS = 1.0  # nats by which a full context differs at least, or the tokens dropped would not show
BF16, FP32 = 0.03, 0.002  # nats, mean over the tokens of a request


@contextmanager
def running(model: Path, stats: Path, **more: Any) -> Iterator[Engine]:
    settings = {
        "policy": "query_mixture",
        "budget": BUDGET,
        "interval": INTERVAL,
        "recent": 32,
        "stats": str(stats),
    }
    engine = Engine(model, compression=settings, **more)
    try:
        yield engine
    finally:
        engine.close()


def two(model: Path, stats: Path, **more: Any) -> Any:
    return running(model, stats, tensor_parallel_size=2, distributed_executor_backend="mp", **more)


def generate(engine: Engine, settings: Any = None) -> list[tuple[Answer, list[Kept]]]:
    """The answers to PROMPTS with what was kept on the way."""
    with engine.traced() as traces:
        answers = engine.generate(PROMPTS, NUM_TOKENS, settings=settings)
    return [(answer, passes_of(traces, answer.request_id)) for answer in answers]


def check_against_transformers(model: Path, found: list[tuple[Answer, list[Kept]]], tolerance: float) -> None:
    for prompt, (answer, passes) in zip(PROMPTS, found, strict=True):
        assert len(passes) >= 3
        assert all(kept.positions.shape[-1] in range(BUDGET, BUDGET + 32) for kept in passes)
        expected = logprobs_with_drops(model, prompt, answer.tokens, passes)
        assert float((answer.logprobs - expected).abs().mean()) <= tolerance
        assert float((answer.logprobs - full_logprobs(model, prompt, answer.tokens)).abs().mean()) > MATTERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four KV heads with two query heads each: two of them on each rank."""
    return make_tiny_model(tmp_path_factory.mktemp("tp") / "model", heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def stats(model: Path) -> Path:
    """Statistics with centres that the query heads of a KV head share, so that they are dealt by KV head."""
    path = model.with_name("stats.safetensors")
    loaded = load_model(model, dtype="float32", device="cpu")
    calibrate(loaded, random_prompts([1024], seed=77), num_centers=8, shared_centers=True).save(path)
    return path


@pytest.fixture(scope="module")
def alone(model: Path, stats: Path) -> dict[str | None, list[tuple[Answer, list[Kept]]]]:
    """Answers and passes of one worker in float32, by policy."""
    with running(model, stats, dtype="float32") as engine:
        return {policy: generate(engine, policy and {"policy": policy}) for policy in (None, "triattention")}


@pytest.fixture(scope="module")
def halves(model: Path, stats: Path, alone: Any) -> Iterator[Engine]:
    """Two workers in float32; made after `alone` is gone."""
    with two(model, stats, dtype="float32") as engine:
        yield engine


@pytest.mark.parametrize("policy", [None, "triattention"])
def test_two_workers_keep_what_one_keeps(policy: str | None, halves: Engine, alone: Any, model: Path) -> None:
    """Float32, and prompts: sums over ranks in another order may swap two tokens that rank alike, or change
    an output token."""
    found = generate(halves, policy and {"policy": policy})
    for prompt, (_, passes), (_, others) in zip(PROMPTS, found, alone[policy], strict=True):
        assert [kept.num_computed for kept in passes] == [kept.num_computed for kept in others]
        of_prompt = [pair for pair in zip(passes, others, strict=True) if pair[0].num_computed <= len(prompt)]
        assert len(of_prompt) >= 2
        for kept, other in of_prompt:
            shared = (kept.positions[..., None] == other.positions[..., None, :]).any(-1)
            assert shared.float().mean() >= 0.99
    of_heads = [heads for _, passes in found for kept in passes for heads in kept.positions]
    assert all(len(heads.unique(dim=0)) == len(heads) for heads in of_heads), "heads keep the same tokens"
    check_against_transformers(model, found, FP32)


@pytest.mark.parametrize("mode", ["union", "per_head"])
def test_shared_sets_are_shared_within_a_rank(mode: str, halves: Engine, model: Path) -> None:
    found = generate(halves, {"mode": mode})
    for _, passes in found:
        for kept in passes:
            first, second = kept.positions.unbind(0)
            assert torch.equal(first, second), "layers of a rank keep different sets"
    check_against_transformers(model, found, FP32)


def test_nothing_is_left_behind(halves: Engine) -> None:
    generate(halves)
    assert halves.is_empty()


def test_bfloat16(tiny_model: Path, tiny_stats: Path) -> None:
    """One KV head on each rank, with centres of each query head."""
    with two(tiny_model, tiny_stats) as engine:
        check_against_transformers(tiny_model, generate(engine), BF16)


def test_one_kv_head_on_two_ranks(tmp_path: Path) -> None:
    """Both ranks hold the KV head, each scores it for its own query heads and attends to its own choice."""
    model = make_tiny_model(tmp_path / "model", heads=4, kv_heads=1)
    with two(model, make_stats(model, tmp_path / "stats.safetensors")) as engine:
        found = generate(engine)
        assert engine.is_empty()
    for _, passes in found:
        assert any(not torch.equal(*kept.positions.unbind(1)) for kept in passes), "replicas keep the same"
    check_against_transformers(model, found, BF16)
