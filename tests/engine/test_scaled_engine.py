"""Engines whose caches hold keys divided by channel: the same answers as with keys as they are, and coded
formats lose less on a model with large key biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from settings import assert_idle

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.engine.step import assembly
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model import key_scales
from kvreclaim.model_paths import STATS_FILE
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.scaled_keys import with_key_scales

BAND = (3, 11)
"""Dims of a rotary band of heads of 16 dims."""
POLICIES = [
    "knorm",
    "keydiff",
    "query_mixture",
    "triattention",
    "expected_attention",
    "shares(surrogate)",
    "shares(knorm)",
    "snapkv",
    "tova",
    "h2o",
    "streaming_llm",
    "streaming_llm(positions=cache)",
    "quest",
    "kvzip",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Qwen2 with key biases of 200 in one band, to which queries pay little; statistics beside it."""
    directory = tmp_path_factory.mktemp("biased")
    model = tiny.build("qwen2", 5)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            rows = [head * 16 + dim for head in range(4) for dim in BAND]
            attention.q_proj.weight[rows] /= 100
            attention.q_proj.bias[rows] /= 100
            attention.k_proj.bias[rows[:4]] = 200.0
    model.save_pretrained(directory)
    llm = LLM(directory, dtype="float32", num_blocks=24)
    calibrate(llm.loaded, tiny.prompts((150, 80), seed=5), num_centers=4).save(directory / STATS_FILE)
    return directory


@pytest.fixture(scope="module")
def plain(path) -> LLM:
    return LLM(path, dtype="float32", num_blocks=24)


@pytest.fixture
def exact(plain, monkeypatch) -> LLM:
    """Scaled keys in fp32, over which nothing is lost."""

    def scaled(loaded, config):
        scales = key_scales.key_scales(loaded.model, loaded.facts)
        return with_key_scales(loaded.facts, scales), replace(FORMATS["fp32"], key_scales="test")

    monkeypatch.setattr("kvreclaim.engine.step.engine.stored_facts", scaled)
    return plain.sibling()


def logprobs(llm: LLM, compression=None) -> torch.Tensor:
    prompt, answer = tiny.prompts((64, 32), seed=3)
    (out,) = llm.score([prompt], [answer], compression)
    assert out.error is None
    assert_idle(llm)
    return torch.tensor(out.logprobs)


def test_full_attention_is_the_same_to_the_bit(plain, exact):
    assert torch.equal(logprobs(exact), logprobs(plain))
    assert exact.engine.cache.layers[0].softmax.key_scale is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_keep_the_same_tokens(plain, exact, policy):
    config = CompressionConfig(policy, budget=48, interval=16, sinks=2, recent=8)
    want = logprobs(plain, config)
    torch.testing.assert_close(logprobs(exact, config), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_codes_lose_less(plain, form, monkeypatch):
    want, scaled = logprobs(plain), plain.sibling(kv_cache_dtype=form)
    assert "keys scaled by channel" in scaled.engine.kernels
    with monkeypatch.context() as patch:
        patch.setattr(key_scales, "key_scales", lambda *_: None)
        unscaled = plain.sibling(kv_cache_dtype=form)
    assert "scaled" not in unscaled.engine.kernels
    errors = [(logprobs(llm) - want).square().mean().sqrt() for llm in (scaled, unscaled)]
    assert errors[0] < errors[1] / 2


def test_a_session_of_keys_as_they_are_is_refused(plain, tmp_path, monkeypatch):
    (prompt,) = tiny.prompts((80,), seed=6)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    scaled = plain.sibling(kv_cache_dtype="int8")
    with monkeypatch.context() as patch:
        patch.setattr(key_scales, "key_scales", lambda *_: None)
        other = plain.sibling(kv_cache_dtype="int8")
    for llm, name in ((scaled, "a"), (other, "b")):
        llm.generate([prompt], params)
        llm.save_session(prompt, tmp_path / name)
    assert plain.sibling(kv_cache_dtype="int8").load_session(tmp_path / "a").num_tokens == 80
    for llm, name in ((scaled, "b"), (other, "a")):
        with pytest.raises(InvalidArgumentError, match="kv_format"):
            llm.load_session(tmp_path / name)


def test_plain_formats_and_other_models_are_left_alone(plain, make_llm):
    for llm in (plain, plain.sibling(kv_cache_dtype="bf16"), make_llm("llama", kv_cache_dtype="int8")):
        assert llm.engine.groups.facts is llm.loaded.facts
        assert "scaled" not in llm.engine.kernels
    assert assembly.stored_facts(plain.loaded, plain.engine.config)[0] is plain.loaded.facts
