"""Centred and scaled keys in vLLM's fp8 cache, of a model with large key biases: against transformers
with keys rounded as they are stored. With compression, policies see the model's keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from biased import make_biased_model
from engines import Answer, Engine
from models import make_stats, random_prompts
from oracle import Kept, logprobs_with_drops, passes_of
from test_vllm_fp8 import apart, pytestmark, stored
from torch import Tensor

from kvreclaim.compression.stats import QueryStats
from kvreclaim.integrations.vllm.worker.centred_layer import CentredKeys, transform_of
from kvreclaim.model.key_transforms import key_transforms
from kvreclaim.model.loader import load_model
from kvreclaim.ops.key_transform import KeyTransform

__all__ = ["pytestmark"]

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # read when an executor is made

KIND = "fp8_e4m3"
PROMPTS = random_prompts((600, 500), seed=3)
NUM_TOKENS = 80
FP32 = 0.002  # nats, mean over the tokens of a request: the same bytes are stored
MATTERS = 0.5  # nats by which keys that are not centred differ at least
SETTINGS = {"budget": 128, "interval": 32, "recent": 32}
Transforms = list[KeyTransform]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_biased_model(tmp_path_factory.mktemp("biased") / "model")


@pytest.fixture(scope="module")
def stats(model: Path) -> Path:
    return make_stats(model, model.with_name("stats.safetensors"))


@contextmanager
def running(model: Path, **more: Any) -> Iterator[Engine]:
    engine = Engine(model, dtype="float32", **more)
    try:
        yield engine
    finally:
        engine.close()


def coded(**more: Any) -> dict[str, Any]:
    return {"kv_cache_dtype": KIND, "centred_keys": True, **more}


def attention_of(engine: Engine) -> list[Any]:
    context = engine.config.compilation_config.static_forward_context
    return [context[name] for name in sorted(context)]


def transforms_of(engine: Engine) -> Transforms:
    found = [transform_of(layer) for layer in attention_of(engine)]
    assert all(own is not None for own in found)
    return found  # type: ignore[return-value]


def expected_transforms(model: Path, stats: Path | None) -> Transforms:
    """Transforms of our own engine, for sequences as long as this one's."""
    loaded = load_model(model, dtype="float32", device="cpu")
    keys = None if stats is None else QueryStats.load(stats).keys()
    found = key_transforms(loaded.model, replace(loaded.facts, max_position=2048), keys)
    assert found is not None
    return list(found)


def check_transforms(found: Transforms, expected: Transforms) -> None:
    for own, want in zip(found, expected, strict=True):
        assert torch.equal(own.scale, want.scale)
        torch.testing.assert_close(own.center, want.center, rtol=1e-4, atol=1e-4)
        assert (own.directions is None) == (want.directions is None)
        if own.directions is not None:
            torch.testing.assert_close(own.directions, want.directions)
            torch.testing.assert_close(own.gains, want.gains)
        assert float(own.center.abs().max()) > 50


def rounding(transforms: Transforms) -> Callable[[int, Tensor], Tensor]:
    """Keys of a layer as the cache stores them."""

    def rounded(layer: int, keys: Tensor) -> Tensor:
        own = transforms[layer]
        (given,) = keys  # [1, K, T, D]
        return own.restored(stored(own.stored(given.transpose(0, 1)).transpose(0, 1), KIND))[None]

    return rounded


def generate(engine: Engine, settings: Any = None) -> list[tuple[Answer, list[Kept]]]:
    with engine.traced() as traces:
        answers = engine.generate(PROMPTS, NUM_TOKENS, settings=settings)
    return [(answer, passes_of(traces, answer.request_id)) for answer in answers]


def check_answers(
    model: Path, found: list[tuple[Answer, list[Kept]]], transforms: Transforms, tolerance: float = FP32
) -> None:
    """Against transformers with keys rounded as they are stored; uncentred ones give others."""
    plain = {"rounding": lambda x: stored(x, KIND)}
    for prompt, (answer, passes) in zip(PROMPTS, found, strict=True):
        given = (model, prompt, answer.tokens, passes)
        same = logprobs_with_drops(*given, **plain, key_rounding=rounding(transforms))
        assert apart(answer, same) <= tolerance
        assert apart(answer, logprobs_with_drops(*given, **plain)) > MATTERS
        exact = logprobs_with_drops(*given)
        assert apart(answer, exact) < float((logprobs_with_drops(*given, **plain) - exact).abs().mean()) / 4


def test_without_compression(model: Path) -> None:
    """Centres of the weights; vLLM's own scheduler."""
    with running(model, **coded()) as engine:
        assert engine.config.parallel_config.worker_cls.endswith(".CentringCPUWorker")
        assert engine.config.scheduler_config.scheduler_cls is None
        check_transforms(found := transforms_of(engine), expected_transforms(model, None))
        answers = engine.generate(PROMPTS, NUM_TOKENS)
        check_answers(model, [(answer, []) for answer in answers], found)
        again = engine.generate(PROMPTS, NUM_TOKENS)
        assert all(answer.cached_tokens > 400 for answer in again)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]


def test_compiled(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by inductor, into a cache of its own."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with running(model, **coded(enforce_eager=False)) as engine:
        assert engine.config.compilation_config.backend == "inductor"
        answers = engine.generate(PROMPTS, NUM_TOKENS)
        check_answers(model, [(answer, []) for answer in answers], transforms_of(engine))


def test_with_compression(model: Path, stats: Path) -> None:
    """Centres of statistics; the layers are probed for compression, too. Of a prompt, policies keep what they
    keep of a cache of exact keys, but for ranks that fp8 swaps: half would be chance."""
    policies = ("shares(query_mixture)", "query_mixture", "knorm")
    settings = {"policy": policies[0], "stats": str(stats), **SETTINGS}
    with running(model, compression=settings) as engine:
        assert not any(isinstance(layer, CentredKeys) for layer in attention_of(engine))
        exact = {policy: generate(engine, {"policy": policy}) for policy in policies}
    with running(model, compression=settings, **coded()) as engine:
        assert engine.config.additional_config["centred_keys"] == str(stats)
        check_transforms(found := transforms_of(engine), expected_transforms(model, stats))
        for policy in policies:
            answers = generate(engine, {"policy": policy})
            check_answers(model, answers, found)
            for (_, passes), (_, others) in zip(answers, exact[policy], strict=True):
                assert len(passes) >= 3
                assert agreement(passes[0].positions, others[0].positions) > 0.9
        assert engine.is_empty()


def agreement(found: Tensor, expected: Tensor) -> float:
    """The share of the positions kept, [L, K, most] with -1 behind them, that the other keeps, too."""
    pairs = [
        ({*a} - {-1}, {*b} - {-1})
        for a, b in zip(found.flatten(0, 1).tolist(), expected.flatten(0, 1).tolist(), strict=True)
    ]
    return sum(len(a & b) for a, b in pairs) / sum(len(b) for _, b in pairs)


@pytest.mark.parametrize("by_statistics", [False, True])
def test_two_workers(by_statistics: bool, tmp_path: Path) -> None:
    """Each worker has the transforms of its own heads; sums along directions are added up in another order,
    so a key between two codes may take the other."""
    model = make_biased_model(tmp_path / "model", heads=8, kv_heads=4)
    stats = make_stats(model, tmp_path / "stats.safetensors") if by_statistics else None
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running(model, **coded(centred_keys=True if stats is None else str(stats)), **two) as engine:
        answers = engine.generate(PROMPTS, NUM_TOKENS)
    check_answers(model, [(answer, []) for answer in answers], expected_transforms(model, stats), 2 * FP32)
