"""A compression pass is a batch on the device: few launches and waits, however many heads there are."""

from __future__ import annotations

import pytest
import tiny
import torch
from launches import counted

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression import layer_stacks
from kvreclaim.engine.compact import methods
from kvreclaim.model_paths import STATS_FILE
from kvreclaim.ops import triton
from kvreclaim.ops.working_memory import working_bytes

GREEDY = SamplingParams(temperature=0.0, max_tokens=34, ignore_eos=True)
UNEVEN = ("shares(surrogate)", "ada_kv(knorm)")
EVEN = (
    *(
        "triattention",
        "knorm",
        "surrogate",
        "query_mixture",
        "expected_attention",
        "keydiff",
        "lagkv",
        "snapkv",
    ),
    *("r_kv", "h2o", "tova", "streaming_llm", "paged_eviction", "segments(knorm)"),
)


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


def rounds(path, policy, num_requests, monkeypatch):
    """Launches and waits of each round of passes, with this many requests due together."""
    llm = LLM(
        path,
        dtype="float32",
        device="cpu",
        kernels="reference",
        num_blocks=64,
        block_size=16,
        enable_prefix_caching=False,
        spread_compression=False,
    )
    object.__setattr__(llm.engine.compression.context, "backend", triton)  # it has the reference's layout
    run, found = llm.engine.compression.run, []

    def watched(jobs):
        with counted() as launches:
            outcomes = run(jobs)
        assert not any(isinstance(done, Exception) for done in outcomes), outcomes
        assert len(jobs) == num_requests
        found.append(launches)
        return outcomes

    monkeypatch.setattr(llm.engine.compression, "run", watched)
    config = CompressionConfig(policy, 48, interval=16, sinks=2, recent=6)
    llm.generate(tiny.prompts((60,) * num_requests, seed=3), GREEDY, config)
    assert len(found) >= 2
    return found


@pytest.mark.parametrize("policy", UNEVEN)
def test_unequal_heads(policy, model, monkeypatch):
    """The first pass and later ones, whatever the number of layers and heads; several requests share most."""
    shapes = [(2, 2, 1), (2, 8, 1), (4, 8, 1), (4, 8, 2)]
    found = [rounds(model(*shape), policy, count, monkeypatch) for *shape, count in shapes]
    one, *others, two = [[launches.total for launches in each] for each in found]
    assert all(other == one for other in others)
    assert max(one) <= 100
    assert all(both < 1.8 * alone for both, alone in zip(two, one, strict=True))
    assert all(launches.waits.total() <= 1 for each in found for launches in each)


@pytest.mark.parametrize("policy", EVEN)
def test_equal_counts(policy, model, monkeypatch):
    """All layers are scored together, however many there are."""
    found = [rounds(model(*shape), policy, 1, monkeypatch) for shape in ((2, 2), (2, 8), (4, 8))]
    few, many, deep = [[launches.total for launches in each] for each in found]
    assert max(*few, *many) <= 100
    assert deep == many
    assert all(launches.waits.total() <= 3 for each in found for launches in each)


@pytest.mark.parametrize("policy", ["ada_kv(snapkv)", "ada_kv(triattention)"])
def test_first_pass_of_unequal_heads(policy, model, monkeypatch):
    """While all heads hold the same tokens, layers are scored together as for equal heads."""
    many, deep = [rounds(model(*shape), policy, 1, monkeypatch)[0] for shape in ((2, 8), (4, 8))]
    assert many.total == deep.total <= 120


TOKENS = 2176
"""Tokens of a sequence at a pass, at a budget of 2,048."""


@pytest.mark.parametrize("policy", ["triattention", "expected_attention", "r_kv", "shares(surrogate)"])
def test_passes_of_a_real_size(policy, model, monkeypatch):
    """Stacks and moves as many as a Llama of 8B takes on a GPU of 80 GB: a tenth of what its weights leave is
    not the pool's."""
    gpu, free = torch.device("cuda"), (80 - 16) * 10**9 // 10
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 10**9))
    path, tokens = model(4, 8), 64
    shape = LLM(path, dtype="float32", device="cpu", num_blocks=8).loaded.facts.layers[0]
    of_8b, of_tiny = 32 * 8 * 256, 4 * 8 * (shape.head_dim + shape.v_head_dim)
    for module, bits in ((layer_stacks, 32), (methods, 16)):
        found = working_bytes(gpu, module.MAX_BYTES) / (of_8b * TOKENS * bits // 8)
        monkeypatch.setattr(module, "MAX_BYTES", int(found * of_tiny * tokens * 4))
    assert max(launches.total for launches in rounds(path, policy, 1, monkeypatch)) <= 100


def test_working_memory(monkeypatch):
    """It is fixed on a CPU; on a GPU more, if much is free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8000, 9000))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (working_bytes(cpu, 10), working_bytes(gpu, 10), working_bytes(gpu, 2000)) == (10, 1000, 2000)
