"""Sliding windows beside compressed full attention on two workers, each with one KV head of every layer."""

from __future__ import annotations

import os
from pathlib import Path

from engines import Engine
from models import make_stats, random_prompts
from oracle import passes_of
from windowed import check_windowed, make_gemma

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # read when an executor is made


def test_two_workers(tmp_path: Path) -> None:
    """A compressed request, another one that hits its first blocks, and one that is not compressed."""
    gemma = make_gemma(tmp_path / "gemma")
    stats = make_stats(gemma, tmp_path / "stats.safetensors")
    settings = {"policy": "shares(query_mixture)", "budget": 128, "interval": 64, "recent": 32}
    engine = Engine(
        gemma,
        compression={**settings, "stats": str(stats)},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        dtype="float32",
        chunk=128,
    )
    [prompt] = random_prompts((450,), seed=1)
    wanted = (None, {"policy": "query_mixture"}, "off")
    try:
        with engine.traced() as trace:
            answers = [engine.generate([prompt], 60, settings=extra)[0] for extra in wanted]
        for answer, extra in zip(answers, wanted, strict=True):
            passes = passes_of(trace, answer.request_id)
            assert not passes if extra == "off" else len(passes) >= 2
            assert (answer.cached_tokens > 0) == (extra is not None)
            check_windowed(gemma, prompt, answer, passes)
    finally:
        engine.close()
