"""KV connectors beside compression: exact blocks are stored and loaded by anybody, others by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from engines import Answer, Engine
from host_offload import offloading, worker_of
from models import random_prompts
from oracle import BF16, check_logprobs, full_logprobs, passes_of

pytestmark = pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."), reason="KV connectors are refused with other versions"
)
SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 32}
CHUNK, NEW = 256, 90


def prompts() -> list[list[int]]:
    """Two with one head, two of their own; all are compressed while they are computed, but the last."""
    head, first, second, own, short = random_prompts((320, 200, 380, 640, 100), seed=5)
    return [head + first, head + second, own, short]


def make_engine(model: Path, compression: dict[str, Any] | None, blocks: int = 40, **more: Any) -> Engine:
    transfer = offloading(offload_prompt_only=False)
    more = {"num_blocks": blocks, "chunk": CHUNK, "kv_transfer_config": transfer, **more}
    return Engine(model, compression=compression, **more)


@pytest.fixture(scope="module", autouse=True)
def same_hashes() -> Iterator[None]:
    """Of equal blocks in all engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        yield


@pytest.fixture(scope="module")
def exact(tiny_model: Path) -> dict[Any, torch.Tensor]:
    """What an engine without compression stores of the prompts and of what it makes of them, a block each."""
    engine = make_engine(tiny_model, None, 130)
    engine.generate(prompts(), NEW)
    stored = worker_of(engine).stored()
    engine.close()
    return stored


@pytest.fixture(scope="module", params=["keydiff", "shares(keydiff)"])
def engine(request: pytest.FixtureRequest, exact: Any, tiny_model: Path) -> Iterator[Engine]:
    """Heads that keep equally many tokens, and unequal ones; the pool is too small for all prompts."""
    engine = make_engine(tiny_model, {**SETTINGS, "policy": request.param})
    yield engine
    engine.close()


def check(model: Path, answers: list[Answer], asked: list[list[int]], trace: Any) -> None:
    """Each answer is what its passes leave of its context, and where there was none, that of the whole."""
    for prompt, answer in zip(asked, answers, strict=True):
        passes = passes_of(trace, answer.request_id)
        if passes:
            check_logprobs(model, prompt, answer.tokens, answer.logprobs, passes)
        else:
            whole = full_logprobs(model, prompt, answer.tokens)
            assert (whole - answer.logprobs).abs().mean() <= BF16


def test_what_is_stored_is_exact_and_what_is_loaded_answers(
    engine: Engine, exact: dict[Any, torch.Tensor], tiny_model: Path
) -> None:
    with engine.traced() as trace:
        first = engine.generate(prompts(), NEW)
        worker = worker_of(engine)
        stored = worker.stored()
        assert engine.engine.reset_prefix_cache()
        before = worker.counts["loaded"]
        again = engine.generate(prompts(), NEW)
        whole = [engine.generate([prompt], 20, settings="off")[0] for prompt in prompts()]
    assert all(answer.figures["compactions"] > 0 for answer in first[:3])
    common = stored.keys() & exact.keys()
    assert len(common) >= CHUNK // 32 * 2
    assert all(torch.equal(stored[key], exact[key]) for key in common)
    assert worker.counts["loaded"] > before
    assert all(answer.cached_tokens >= CHUNK for answer in again[:3])
    check(tiny_model, first, prompts(), trace)
    check(tiny_model, again, prompts(), trace)
    check(tiny_model, whole, prompts(), trace)
    assert engine.is_empty()


def test_aborts_and_preemptions_store_nothing_else(
    engine: Engine, exact: dict[Any, torch.Tensor], tiny_model: Path
) -> None:
    """Uncompressed requests beside compressed ones take the pool from them; some end early."""
    asked = [*prompts(), *random_prompts([500, 400, 450], seed=6)]
    names = [engine.add(prompt, NEW) for prompt in asked]
    names += [engine.add(asked[0], 300, settings="off"), engine.add(asked[2], 300, settings="off")]
    steps = iter(range(10_000))

    def abort() -> None:
        step = next(steps)
        if step in (3, 6):
            engine.abort([names[4 + step // 6]])

    with engine.traced() as trace:
        watch = engine.run(after_step=abort)
    assert watch.preemptions > 0
    stored = worker_of(engine).stored()
    assert all(torch.equal(stored[key], exact[key]) for key in stored.keys() & exact.keys())
    assert engine.engine.reset_prefix_cache()
    before = worker_of(engine).counts["loaded"]
    whole = [engine.generate([prompt], 20, settings="off")[0] for prompt in prompts()]
    assert worker_of(engine).counts["loaded"] > before
    check(tiny_model, whole, prompts(), trace)
    assert engine.is_empty()
