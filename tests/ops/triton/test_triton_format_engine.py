"""A whole engine whose cache holds codes answers on these kernels what it answers on the reference."""

from __future__ import annotations

import pytest
import tiny
import torch
from triton_pair import DEVICE

from kvreclaim import LLM, CompressionConfig, SamplingParams


@pytest.mark.parametrize(
    ("family", "kv_format", "policy"),
    [
        ("llama", "int4", "ada_kv(knorm)"),
        ("gemma2", "kivi4", "knorm"),
        ("deepseek-v3", "turboquant4", "tova"),
    ],
)
def test_an_engine_on_triton(tiny_dir, family: str, kv_format: str, policy: str) -> None:
    found = []
    for kernels in ("reference", "triton"):
        llm = LLM(
            tiny_dir(family),
            dtype="float32",
            device=str(DEVICE),
            num_blocks=40,
            kernels=kernels,
            block_size=8,
            kv_cache_dtype=kv_format,
        )
        config = CompressionConfig(policy=policy, budget=24, interval=8, sinks=2, recent=6)
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True)
        outputs = llm.generate(tiny.prompts((33, 5), seed=1), params, config)
        assert [out.error for out in outputs] == [None, None]
        assert outputs[0].metrics.compactions > 0
        found.append([out.outputs[0] for out in outputs])
    reference, triton = found
    assert [out.token_ids for out in triton] == [out.token_ids for out in reference]
    for ours, theirs in zip(triton, reference, strict=True):
        pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
        values = [(next(iter(a.values())).logprob, next(iter(b.values())).logprob) for a, b in pairs]
        torch.testing.assert_close(*torch.tensor(values).unbind(1), atol=1e-4, rtol=0)
