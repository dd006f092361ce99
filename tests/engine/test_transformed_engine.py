"""Engines whose caches hold centred and scaled keys: the same answers as with keys as they are, and coded
formats lose less on a model with large key biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from settings import assert_idle, with_options

from kvreclaim import LLM, BeamSearchParams, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.stats import QueryStats
from kvreclaim.engine.step import assembly
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model import key_transforms
from kvreclaim.model_paths import STATS_FILE
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.transformed_keys import with_key_transforms

BANDS = ((3, 11), (5, 13), (2, 10))
"""Dims of rotary bands of heads of 16 dims: neighbours in layer or head differ, and cells change hands."""
SMALL = {"budget": 48, "interval": 16, "sinks": 2, "recent": 8}
POLICIES = [
    "knorm",
    "keydiff",
    "query_mixture",
    "triattention",
    "expected_attention",
    "shares(surrogate)",
    "shares(knorm)",
    "ada_kv(keydiff)",
    "ada_kv(snapkv)",
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
    """Qwen2 with key biases of 200 and 100 in one band of each head, to which queries pay little; statistics
    beside it."""
    directory = tmp_path_factory.mktemp("biased")
    model = tiny.build("qwen2", 5)
    with torch.no_grad():
        for n, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            for head in range(4):
                rows = [head * 16 + dim for dim in BANDS[(n + head // 2) % len(BANDS)]]
                attention.q_proj.weight[rows] /= 100
                attention.q_proj.bias[rows] /= 100
            for head in range(2):
                rows = [head * 16 + dim for dim in BANDS[(n + head) % len(BANDS)]]
                attention.k_proj.bias[rows] = 200.0 / (1 + head)
    model.save_pretrained(directory)
    llm = LLM(directory, dtype="float32", num_blocks=24)
    calibrate(llm.loaded, tiny.prompts((150, 80), seed=5), num_centers=4).save(directory / STATS_FILE)
    return directory


@pytest.fixture(scope="module")
def plain(path) -> LLM:
    return LLM(path, dtype="float32", num_blocks=24)


def transformed(llm: LLM, monkeypatch, **options) -> LLM:
    """A sibling with transformed keys in fp32, over which nothing is lost but by rounding."""

    def facts_and_form(loaded, config, stats):
        own = key_transforms.key_transforms(loaded.model, loaded.facts, QueryStats.load(stats).keys())
        return with_key_transforms(loaded.facts, own), replace(FORMATS["fp32"], transform="test")

    monkeypatch.setattr("kvreclaim.engine.step.engine.stored_facts", facts_and_form)
    made = llm.sibling(**options)
    keys = made.engine.cache.layers[0].softmax.keys
    assert keys is not None
    assert keys.center.abs().max() > 50
    assert keys.scale.unique().numel() > 1
    return made


@pytest.fixture
def exact(plain, monkeypatch) -> LLM:
    return transformed(plain, monkeypatch)


def logprobs(llm: LLM, compression=None) -> torch.Tensor:
    prompt, answer = tiny.prompts((64, 32), seed=3)
    (out,) = llm.score([prompt], [answer], compression)
    assert out.error is None
    assert_idle(llm)
    return torch.tensor(out.logprobs)


def test_full_attention_is_the_same(plain, exact):
    torch.testing.assert_close(logprobs(exact), logprobs(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_keep_the_same_tokens(plain, exact, policy):
    config = CompressionConfig(policy, **SMALL)
    want = logprobs(plain, config)
    torch.testing.assert_close(logprobs(exact, config), want, rtol=1e-5, atol=1e-5)


POOLED = "pooled(alpha=0.9, rows=16, first=24, last=6, layers=0, block=16, sinks=1, local=1)"
FEATURES = {
    "host": ({"full_cache_host_size": 0.001, "num_blocks": 1}, {}, None),
    "verify": ({}, {}, CompressionConfig("query_mixture", verify=True, verify_tokens=8, **SMALL)),
    "sparse prefill": (
        {},
        {"sparse_prefill": POOLED},
        None,
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_answer_alike(plain, monkeypatch, name):
    options, fields, config = FEATURES[name]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = with_options(tiny.prompts((70, 33), seed=8), **fields)

    def token_ids(llm):
        outputs = llm.generate(prompts, params, config)
        assert [out.error for out in outputs] == [None, None]
        return [out.outputs[0].token_ids for out in outputs]

    want = token_ids(plain.sibling(**options))
    assert token_ids(transformed(plain, monkeypatch, **options)) == want


TIERS = {"kv_offloading_size": 16e6 / 2**30, "kv_load_policy": "wait_complete"}
DISK = {**TIERS, "kv_offloading_disk_size": 32e6 / 2**30}
WAYS = {
    "beams": {},
    "drafts": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    "swap": {**TIERS, "num_blocks": 9, "preemption_mode": "swap"},
    "disk": DISK,
    "session": {},
    "snapshot": {"prefix_snapshot_fraction": 0.5},
}


def answers(llm: LLM, way: str, has_document: bool = False) -> list:
    """Tokens of a document and two questions, or of two searches. has_document: its tokens are loaded"""
    document, *questions = tiny.prompts((70, 9, 23), seed=8)
    prompts, config = [document + question for question in questions], None
    if way == "beams":
        settings = BeamSearchParams(beam_width=3, max_tokens=24, num_return_sequences=3, ignore_eos=True)
        return [[each.token_ids for each in out.outputs] for out in llm.beam_search(prompts, settings)]
    if way == "snapshot":
        prompts = with_options(prompts, compress_prompt_at=len(document))
        config = CompressionConfig("keydiff", **SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    batches = [[prompt] for prompt in prompts] if way == "snapshot" else [prompts]
    outputs = [out for batch in batches for out in llm.generate(batch, params, config)]
    assert [out.error for out in outputs] == [None, None]
    if has_document:
        assert all(out.metrics.num_cached_tokens >= 64 for out in outputs)
        assert any(out.metrics.num_disk_tokens >= 64 for out in outputs) == (way == "disk")
    return [out.outputs[0].token_ids for out in outputs]


@pytest.mark.parametrize("form", ["fp32", "int4", "int8+int4"])
@pytest.mark.parametrize("way", WAYS)
def test_what_moves_or_shares_blocks_answers_alike(plain, monkeypatch, tmp_path, way, form):
    """Transformed keys in fp32: the tokens of keys as they are. Codes: those of an engine without the way."""

    def make(**options):
        own = {"num_blocks": 40, **options}
        if form == "fp32":
            return transformed(plain, monkeypatch, **own)
        llm = plain.sibling(kv_cache_dtype=form, **own)
        assert llm.engine.cache.layers[0].softmax.keys.directions is not None
        return llm

    alone = {"num_blocks": 40, "enable_prefix_caching": False, "prefix_snapshot_fraction": 0.0}
    want = answers(plain.sibling(**alone) if form == "fp32" else make(**alone), way)
    options = dict(WAYS[way])
    if way == "disk":
        options["kv_offloading_disk_path"] = str(tmp_path)
    llm = make(**options)
    assert answers(llm, way) == want
    if way == "swap":
        assert llm.engine.totals.swaps > 0
    if way == "snapshot":
        assert len(llm.engine.scheduler.snapshots) == 1
    if way == "drafts":
        assert llm.engine.totals.speculation.num_drafts > 0
    if way in ("disk", "session"):
        document = tiny.prompts((70,), seed=8)[0]
        if way == "session":
            llm.save_session(document, tmp_path / "a.session")
        llm.close()
        llm = make(**options)
        if way == "session":
            llm.load_session(tmp_path / "a.session")
        assert answers(llm, way, has_document=True) == want
    assert_idle(llm)
    llm.close()


def test_forks_whose_heads_hold_unequal_numbers_answer_alike(plain, monkeypatch):
    """A pass of a fork fills blocks that are new, whose cells its heads take in any order."""
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=40, ignore_eos=True)
    config = CompressionConfig("shares(knorm)", **SMALL)
    prompts = tiny.prompts((70,), seed=8)

    def token_ids(llm):
        (out,) = llm.generate(prompts, params, config)
        assert out.error is None
        return [each.token_ids for each in out.outputs]

    want = token_ids(plain.sibling(num_blocks=60))
    assert token_ids(transformed(plain, monkeypatch, num_blocks=60)) == want


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_codes_lose_less(plain, form, monkeypatch):
    want, better = logprobs(plain), plain.sibling(kv_cache_dtype=form)
    assert "keys centred and scaled" in better.engine.kernels
    with monkeypatch.context() as patch:
        patch.setattr(key_transforms, "key_transforms", lambda *_: None)
        as_they_are = plain.sibling(kv_cache_dtype=form)
    assert "centred" not in as_they_are.engine.kernels
    errors = [(logprobs(llm) - want).square().mean().sqrt() for llm in (better, as_they_are)]
    assert errors[0] < errors[1] / 2


def test_a_session_of_keys_as_they_are_is_refused(plain, tmp_path, monkeypatch):
    (prompt,) = tiny.prompts((80,), seed=6)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    own = plain.sibling(kv_cache_dtype="int8")
    with monkeypatch.context() as patch:
        patch.setattr(key_transforms, "key_transforms", lambda *_: None)
        other = plain.sibling(kv_cache_dtype="int8")
    for llm, name in ((own, "a"), (other, "b")):
        llm.generate([prompt], params)
        llm.save_session(prompt, tmp_path / name)
    assert plain.sibling(kv_cache_dtype="int8").load_session(tmp_path / "a").num_tokens == 80
    for llm, name in ((own, "b"), (other, "a")):
        with pytest.raises(InvalidArgumentError, match="kv_format"):
            llm.load_session(tmp_path / name)


def test_plain_formats_and_models_without_statistics_are_left_alone(plain, tmp_path):
    tiny.build("llama", 5).save_pretrained(tmp_path)
    llama = LLM(tmp_path, dtype="float32", num_blocks=24, kv_cache_dtype="int8")
    for llm in (plain, plain.sibling(kv_cache_dtype="bf16"), llama):
        assert llm.engine.groups.facts is llm.loaded.facts
        assert "centred" not in llm.engine.kernels
    assert assembly.stored_facts(plain.loaded, plain.engine.config, None)[0] is plain.loaded.facts
