"""The engine has the same outputs on every back-end, and logs which one runs."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import tiny
import torch

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.native_modules import NativeLinear
from kvreclaim.ops import native
from kvreclaim.ops.native.decoder import max_rows

PROMPTS = tiny.prompts((40, 90, 23), seed=8)
TRACES = tiny.prompts((70, 50, 90), seed=9)
POLICIES = ("full", "streaming_llm", "knorm", "triattention", "query_mixture")

if (reason := native.unavailable_reason()) is not None:
    pytest.skip(reason, allow_module_level=True)


def config(policy: str) -> CompressionConfig:
    return CompressionConfig(policy, budget=48, interval=16, sinks=2, recent=8)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("policy", POLICIES)
def test_native_kernels_compress_and_attend_as_the_reference_does(family, policy, make_llm) -> None:
    """Teacher-forced: what is kept at each pass, and what is attended to, show in the log-probabilities."""
    scores = {}
    for kernels in ("native", "reference"):
        llm = make_llm(family, kernels=kernels, max_num_batched_tokens=64)
        outs = llm.score(PROMPTS, TRACES, config(policy))
        assert [out.error for out in outs] == [None] * len(outs)
        assert all(out.metrics.compactions > 0 for out in outs) or policy == "full"
        scores[kernels] = torch.cat([torch.tensor(out.logprobs) for out in outs])
    torch.testing.assert_close(scores["native"], scores["reference"], rtol=1e-4, atol=1e-4)


def test_threads_and_company_change_no_token(make_llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        llm = make_llm(kernels="native")
        alone = [llm.generate(p, params, config("query_mixture"))[0].outputs[0].token_ids for p in PROMPTS]
        torch.set_num_threads(2)
        together = make_llm(kernels="native").generate(PROMPTS, params, config("query_mixture"))
    finally:
        torch.set_num_threads(threads)
    assert [out.outputs[0].token_ids for out in together] == alone


def test_the_choice_is_logged_once_at_the_start(make_llm, caplog) -> None:
    with caplog.at_level(logging.INFO, "kvreclaim"):
        llm = make_llm()
    lines = [r for r in caplog.records if "kernels:" in r.getMessage()]
    assert [r.levelno for r in lines] == [logging.INFO]
    assert llm.engine.kernels.startswith("kernels: native")
    caplog.clear()
    llm = make_llm(block_size=8)
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))
    (line,) = [r for r in caplog.records if "kernels:" in r.getMessage()]
    assert line.levelno == logging.WARNING
    assert "not native: block size 8" in line.getMessage()


def test_a_forced_reference_runs_no_native_module(make_llm) -> None:
    llm = make_llm(kernels="reference")
    assert not any(isinstance(m, NativeLinear) for m in llm.loaded.model.modules())
    assert "native" not in llm.engine.kernels


def test_kernels_that_cannot_run_are_refused_with_the_reason(make_llm) -> None:
    with pytest.raises(InvalidArgumentError, match="block size 8"):
        make_llm(kernels="native", block_size=8)
    with pytest.raises(InvalidArgumentError, match="auto, native, triton, reference"):
        make_llm(kernels="cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [False, True], ids=["few", "many"])
def test_sequences_that_decode_together_draw_what_each_draws_alone(dtype, most, make_llm) -> None:
    """Equal to the bit, up to as many rows as the kernels take on this CPU."""
    count = min(100, max(32, max_rows(getattr(torch, dtype)))) if most else 20
    llm = make_llm(dtype=dtype, block_size=16, num_blocks=6 * count, max_num_seqs=count)
    prompts = tiny.prompts([33] * count, seed=4)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    for prompt in prompts:  # of each only the last token is left to compute
        llm.generate([prompt], replace(params, max_tokens=1))
    alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    together = [out.outputs[0] for out in llm.generate(prompts, params)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert [out.logprobs for out in together] == [out.logprobs for out in alone]
