"""What a decode step makes the host of a GPU do, counted on the CPU: waits, launches outside of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from launches import Launches, counted

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.engine.execute.graphs import DecodeGraphs
from kvreclaim.ops.triton import support

if not support.is_interpreted():
    pytest.skip("counts what Triton's interpreter is given", allow_module_level=True)


def graphs_of(llm: LLM) -> DecodeGraphs:
    """Graphs whose replay is left out: it is one launch. Their logits are those of the capture."""
    engine = llm.engine

    def capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        logits = run()
        return lambda: logits

    limits = {"max_num_seqs": 4, "max_model_len": 200, "max_chunk": 64}
    model, groups = llm.loaded.model, engine.groups
    return DecodeGraphs(model, engine.cache, engine.backend, groups, **limits, capture=capture)


def steps(llm: LLM, compression: CompressionConfig | None, **params: Any) -> list[Launches]:
    """Return the launches of decode steps of three sequences."""
    given = SamplingParams(max_tokens=20, ignore_eos=True, **params)
    compressor = None if compression is None else llm.compressor(compression)
    for i, prompt in enumerate(tiny.prompts((40, 30, 35), seed=1)):
        llm.engine.add_request(str(i), prompt, given, compressor)
    llm.engine.step()
    found = []
    for _ in range(6):
        with counted() as step:
            llm.engine.step()
        found.append(step)
    return found


@pytest.mark.parametrize("policy", [None, "ada_kv(knorm)", "snapkv"])
@pytest.mark.parametrize(("temperature", "waits", "most"), [(0.0, 1, 10), (1.0, 2, 90)])
def test_a_replayed_step_waits_once_and_once_more_for_draws(
    tiny_dir: Callable[[str], Any], temperature: float, waits: int, most: int, policy: str | None
) -> None:
    given = {"dtype": "float32", "device": "cpu", "kernels": "triton", "max_model_len": 200}
    with LLM(tiny_dir("llama"), num_blocks=40, enable_prefix_caching=False, **given) as llm:
        llm.engine.runner.graphs = graphs = graphs_of(llm)
        config = None
        if policy is not None:
            config = CompressionConfig(policy, budget=16, interval=64, sinks=2, recent=6)
        found = steps(llm, config, temperature=temperature, seed=1)
        assert not graphs.refusals
        assert [step.waits.total() for step in found[1:]] == [waits] * 5
        assert max(step.total for step in found[1:]) <= most
