"""Unequal heads where steps overlap, and where the model is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines import Engine
from uneven import check_mixed, compression


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
    """By inductor, into a cache of its own."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    engine = Engine(tiny_model, compression=compression(tiny_stats), enforce_eager=False)
    try:
        assert engine.config.compilation_config.backend == "inductor"
        check_mixed(engine, tiny_model, 2)
    finally:
        engine.close()
