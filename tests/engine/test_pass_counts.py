"""A compression pass is a batch on the device: few launches and waits, however many heads there are."""

from __future__ import annotations

import pytest
import tiny
from launches import counted

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.model_paths import STATS_FILE
from kvreclaim.ops import triton

GREEDY = SamplingParams(temperature=0.0, max_tokens=34, ignore_eos=True)
POLICIES = ("shares(surrogate)", "ada_kv(knorm)", "triattention", "knorm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(layers, KV heads) -> a directory with statistics."""
    saved = {}

    def of(layers, heads):
        if (layers, heads) not in saved:
            shape = {"num_hidden_layers": layers, "num_key_value_heads": heads, "num_attention_heads": 8}
            path = tiny.save_model("llama", tmp_path_factory.mktemp("llama"), **shape)
            llm = LLM(path, dtype="float32", device="cpu", num_blocks=8)
            calibrate(llm.loaded, tiny.prompts((150, 40, 80), seed=5), num_centers=4).save(path / STATS_FILE)
            saved[layers, heads] = path
        return saved[layers, heads]

    return of


def passes(path, policy, monkeypatch):
    """Launches and waits of each round of passes, with how many requests it had."""
    options = {"num_blocks": 64, "block_size": 16, "enable_prefix_caching": False}
    llm = LLM(path, dtype="float32", device="cpu", kernels="reference", spread_compression=False, **options)
    object.__setattr__(llm.engine.compression.context, "backend", triton)  # it has the reference's layout
    run, found = llm.engine.compression.run, []

    def watched(jobs):
        with counted() as launches:
            outcomes = run(jobs)
        assert not any(isinstance(done, Exception) for done in outcomes), outcomes
        found.append((len(jobs), launches))
        return outcomes

    monkeypatch.setattr(llm.engine.compression, "run", watched)
    llm.generate(
        tiny.prompts((60, 60), seed=3), GREEDY, CompressionConfig(policy, 48, interval=16, sinks=2, recent=6)
    )
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_launches_and_waits_of_a_pass(policy, model, monkeypatch):
    for layers, heads in ((2, 2), (2, 8), (4, 8)):
        found = passes(model(layers, heads), policy, monkeypatch)
        print(policy, layers, heads, [(n, x.total, x.waits.total()) for n, x in found])
        print("  ", found[-1][1])
