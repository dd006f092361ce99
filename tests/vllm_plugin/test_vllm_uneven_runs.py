"""Unequal heads where steps overlap, and where the model is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import Engine
from models import random_prompts
from oracle import check_logprobs, passes_of
from uneven import OUTPUT, check_mixed, compression, is_uneven

from kvreclaim.integrations.vllm.entry import worker_hooks
from kvreclaim.integrations.vllm.worker.cells import self_test


def test_asynchronous_across_processes(tiny_model: Path, tiny_stats: Path, monkeypatch: Any) -> None:
    """The first test: an engine in this process freezes what vLLM reads from the environment."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the trace holds tensors
    engine = Engine(tiny_model, compression=compression(tiny_stats), asynchronous=True)
    try:
        assert engine.config.scheduler_config.scheduler_cls.endswith(".AsyncReclaimScheduler")
        check_mixed(engine, tiny_model, 1)
    finally:
        engine.close()


def test_compiled(tiny_model: Path, tiny_stats: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Compiled by inductor, into a cache of its own."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    engine = Engine(tiny_model, compression=compression(tiny_stats), enforce_eager=False)
    try:
        compilation = engine.config.compilation_config
        assert (compilation.backend, compilation.mode.name) == ("inductor", "DYNAMO_TRACE_ONCE")
        check_mixed(engine, tiny_model, 2)
    finally:
        engine.close()


def test_equal_heads_where_the_proof_fails(tiny_model: Path, tiny_stats: Path, monkeypatch: Any) -> None:
    """A line at start says so; by the same ranking, in as many blocks."""
    lines: list[str] = []
    monkeypatch.setattr(worker_hooks.logger, "warning", lambda text, *of: lines.append(text % of))
    monkeypatch.setattr(self_test, "TOLERANCE", -1.0)
    engine = Engine(tiny_model, compression=compression(tiny_stats))
    try:
        assert engine.runner.reclaim.uneven is None
        [line] = lines
        assert "heads keep equally many tokens here" in line
        assert "(CPU_ATTN" in line
        [prompt] = random_prompts([600], seed=6)
        with engine.traced() as trace:
            [answer] = engine.generate([prompt], OUTPUT)
        passes = passes_of(trace, answer.request_id)
        assert not is_uneven(passes)
        assert answer.figures["kv_tokens"] < 128 + 64
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes)
        assert engine.is_empty()
    finally:
        engine.close()
