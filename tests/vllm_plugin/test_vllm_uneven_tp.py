"""Two workers: each shares out the cells of its own heads, and both free as many blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engines import Engine
from models import make_stats, make_tiny_model
from uneven import check_mixed, compression

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # read when an executor is made


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_two_workers(kv_heads: int, tmp_path: Path) -> None:
    """Two KV heads on each, or the same one on both."""
    model = make_tiny_model(tmp_path / "model", heads=8, kv_heads=kv_heads)
    settings = compression(make_stats(model, tmp_path / "stats.safetensors"))
    engine = Engine(model, compression=settings, tensor_parallel_size=2, distributed_executor_backend="mp")
    try:
        check_mixed(engine, model, 5)
    finally:
        engine.close()
