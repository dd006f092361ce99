"""Two workers: each sees hidden states whole, scores for its own heads, and keeps what one would."""

from __future__ import annotations

import os
from pathlib import Path

from choices import check_choices, watched
from engines import Engine
from models import make_tiny_model, random_prompts
from oracle import check_logprobs, passes_of

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.model.loader import load_model

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # read when an executor is made
SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 16}


def test_two_workers(tmp_path: Path) -> None:
    model, path = make_tiny_model(tmp_path / "model", heads=8, kv_heads=4), tmp_path / "stats.safetensors"
    loaded = load_model(model, dtype="float32", device="cpu")
    calibrate(loaded, random_prompts([512] * 2, seed=77), kvzap="mlp").save(path)
    compression = {"policy": "kvzap", "stats": str(path), **SETTINGS}
    engine = Engine(
        model,
        compression=compression,
        dtype="float32",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    try:
        [prompt] = random_prompts([500], seed=6)
        with engine.traced() as trace:
            [answer] = engine.generate([prompt], 100)
    finally:
        engine.close()
    passes = passes_of(trace, answer.request_id)
    assert len(passes) >= 3
    text = watched(model, [*prompt, *answer.tokens], passes)
    compressor = Compressor(CompressionConfig(**{**compression, "stats": path}), loaded.facts)
    check_choices(text, compressor, 32, passes, least=0.98)  # scores are fp16
    check_logprobs(model, prompt, answer.tokens, answer.logprobs, passes)
