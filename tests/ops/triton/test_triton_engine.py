"""A whole engine on these kernels answers what it answers on the reference: policies, formats, families."""

from __future__ import annotations

import pytest
import tiny
import torch
from triton_pair import DEVICE

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate

CASES = [
    ("llama", "triattention", "auto"),
    ("gemma2", "query_mixture", "auto"),  # soft-cap, sliding window and scale; the window reads positions
    ("llama", "ada_kv(knorm)", "auto"),  # tables of heads
    ("llama", "pyramidkv(knorm)", "auto"),
    ("llama", "paged_eviction", "auto"),  # dropped blocks
    ("llama", "streaming_llm(positions=cache)", "auto"),  # turned keys
    ("llama", "quest", "auto"),  # sparse reads, no pass
    ("llama", "ada_kv(knorm)", "int4"),
    ("gemma2", "knorm", "int8"),
    ("deepseek-v3", "tova", "turboquant4"),
]


@pytest.mark.parametrize(("family", "policy", "kv_format"), CASES)
def test_an_engine_on_triton(tiny_dir, family: str, policy: str, kv_format: str, tmp_path) -> None:
    stats = tmp_path / "stats.safetensors"
    found = []
    for kernels in ("reference", "triton"):
        llm = LLM(
            tiny_dir(family),
            dtype="float32",
            device=str(DEVICE),
            num_blocks=40,
            kernels=kernels,
            block_size=8,
            max_num_batched_tokens=24,
            kv_cache_dtype=kv_format,
        )
        if not stats.exists():
            calibrate(llm.loaded, tiny.prompts((150, 40, 80), seed=5), num_centers=4).save(stats)
        config = CompressionConfig(policy, budget=24, interval=8, sinks=2, recent=6, stats=stats)
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
        outputs = llm.generate(tiny.prompts((33, 9), seed=1), params, config)
        assert [out.error for out in outputs] == [None, None]
        assert (outputs[0].metrics.compactions > 0) == (policy != "quest")
        found.append([out.outputs[0] for out in outputs])
    reference, triton = found
    assert [out.token_ids for out in triton] == [out.token_ids for out in reference]
    for ours, theirs in zip(triton, reference, strict=True):
        pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
        values = [(next(iter(a.values())).logprob, next(iter(b.values())).logprob) for a, b in pairs]
        torch.testing.assert_close(*torch.tensor(values).unbind(1), atol=1e-4, rtol=0)
