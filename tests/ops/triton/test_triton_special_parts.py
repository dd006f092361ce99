"""Policies with head tables, sparse reads, dropped blocks or turned keys: as on the reference."""

from __future__ import annotations

import pytest
import tiny
import torch
from triton_pair import DEVICE

from kvreclaim import LLM, CompressionConfig, SamplingParams


@pytest.mark.parametrize(
    ("policy", "happens"),
    [
        ("ada_kv(knorm)", True),
        ("pyramidkv(knorm)", True),
        ("paged_eviction", True),
        ("streaming_llm(positions=cache)", True),
        ("quest", False),
    ],
)
def test_an_engine_on_triton(tiny_dir, policy: str, happens: bool) -> None:
    found = []
    for kernels in ("reference", "triton"):
        llm = LLM(
            tiny_dir("llama"),
            dtype="float32",
            device=str(DEVICE),
            num_blocks=40,
            kernels=kernels,
            block_size=8,
            max_num_batched_tokens=24,
        )
        config = CompressionConfig(policy=policy, budget=24, interval=8, sinks=2, recent=6)
        params = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
        outputs = llm.generate(tiny.prompts((41, 9), seed=1), params, config)
        assert [out.error for out in outputs] == [None, None]
        assert (outputs[0].metrics.compactions > 0) == happens
        found.append(outputs)
    reference, triton = ([out.outputs[0] for out in outputs] for outputs in found)
    assert [out.token_ids for out in triton] == [out.token_ids for out in reference]
    for ours, theirs in zip(triton, reference, strict=True):
        pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
        values = [(next(iter(a.values())).logprob, next(iter(b.values())).logprob) for a, b in pairs]
        torch.testing.assert_close(*torch.tensor(values).unbind(1), atol=1e-4, rtol=0)
