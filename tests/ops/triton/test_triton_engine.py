"""A whole engine on these kernels answers what it answers on the reference, compression included."""

from __future__ import annotations

import pytest
import tiny
from triton_pair import DEVICE

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate


@pytest.mark.parametrize(("family", "policy"), [("llama", "triattention"), ("gemma2", "query_mixture")])
def test_an_engine_on_triton(tiny_dir, family: str, policy: str, tmp_path) -> None:
    """gemma2: soft-cap, sliding window and scale; the window reads positions after a compaction."""
    stats = tmp_path / "stats.safetensors"
    answers = []
    for kernels in ("reference", "triton"):
        llm = LLM(
            tiny_dir(family),
            dtype="float32",
            device=str(DEVICE),
            num_blocks=40,
            kernels=kernels,
            block_size=8,
        )
        if not stats.exists():
            calibrate(llm.loaded, tiny.prompts((150, 40, 80), seed=5), num_centers=4).save(stats)
        compression = CompressionConfig(policy=policy, budget=24, interval=4, recent=8, stats=stats)
        outputs = llm.generate(
            tiny.prompts((26, 9), seed=1), SamplingParams(temperature=0, max_tokens=8), compression
        )
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
