"""Engines over caches of latents: transformers' tokens, policies over a single KV head, the bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from checking import check_shadow
from checking import first_tokens as tokens
from settings import EVICTING, assert_idle, small
from transformers import DeepseekV3Config

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.registry import make_policy, policy_names
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.model import loader
from kvreclaim.ops import reference
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import FORMATS

PROMPTS = tiny.prompts((5, 33, 17, 1, 64), seed=3)
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
LATENT = pytest.mark.parametrize("family", tiny.LATENT)
SERVED = tuple(name for name in policy_names() if Signal.OUTPUT_PROJECTION not in make_policy(name).needs)
ROOMY = 256
"""A budget that no sequence here exceeds."""


@pytest.fixture(scope="module")
def expected(calibrated_dir) -> Callable[[str], list[list[int]]]:
    """family -> what transformers' generate() answers."""
    return tiny.remembered(calibrated_dir, PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="module")
def shared_llm(calibrated_dir) -> Callable[[str], LLM]:
    """family -> one engine for many settings."""
    made: dict[str, LLM] = {}

    def llm(family: str) -> LLM:
        if family not in made:
            made[family] = LLM(calibrated_dir(family), dtype="float32", device="cpu", num_blocks=60)
        return made[family]

    return llm


@pytest.mark.parametrize("policy", [name for name in SERVED if name != "oracle"])
@LATENT
def test_a_budget_that_never_binds_changes_nothing(family, policy, shared_llm, expected) -> None:
    """Twice: the second time prefixes are found in the cache, except by policies that take no hit."""
    config = CompressionConfig(policy, budget=ROOMY)
    for _ in range(2):
        outputs = shared_llm(family).generate(PROMPTS, GREEDY, config)
        assert tokens(outputs) == expected(family)
        assert all(output.metrics.compactions == 0 for output in outputs)
    assert_idle(shared_llm(family))


@LATENT
def test_a_budget_that_never_binds_changes_no_score(family, shared_llm) -> None:
    given = tiny.prompts((20,), seed=4)
    llm = shared_llm(family)
    plain, roomy = (llm.score(PROMPTS[1:2], given, c)[0] for c in (None, CompressionConfig("oracle", ROOMY)))
    assert roomy.predicted == plain.predicted
    assert roomy.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "policy", [*(name for name in EVICTING if name in SERVED), "pyramidkv(knorm)", "ada_kv(snapkv(window=2))"]
)
def test_each_layer_attends_exactly_to_what_it_kept(policy, make_llm, monkeypatch) -> None:
    """deepseek-v2's prompts are attended with expanded keys, alone and beside rows that decode."""
    llm = make_llm("deepseek-v2", enable_prefix_caching=False, block_size=8, max_num_batched_tokens=40)
    shadow, outputs = check_shadow(llm, small(policy, budget=32), monkeypatch, GREEDY)
    assert outputs[0].metrics.compactions >= 2
    assert shadow.num_passes == sum(out.metrics.compactions for out in outputs)
    assert shadow.num_expanded > 0
    (layers, heads) = (2, 1)
    shapes = {h.live.shape[:2] for h in shadow.histories.values()}
    assert shapes == {(layers, heads)}


def test_what_cannot_be_expanded_is_absorbed(make_llm, monkeypatch) -> None:
    """deepseek-v3 here gains nothing by expanding."""
    llm = make_llm("deepseek-v3", enable_prefix_caching=False, max_num_batched_tokens=40)
    shadow, _ = check_shadow(llm, None, monkeypatch, GREEDY)
    assert shadow.num_expanded == 0
    assert shadow.num_calls > 0


def test_forks_and_preemption(make_llm, monkeypatch) -> None:
    llm = make_llm(
        "deepseek-v2", enable_prefix_caching=False, block_size=8, num_blocks=20, max_num_batched_tokens=48
    )
    params = SamplingParams(temperature=1.0, n=3, max_tokens=40, seed=1, ignore_eos=True)
    shadow, outputs = check_shadow(llm, small("query_mixture", budget=40), monkeypatch, params, (40, 45))
    assert all(len(output.token_ids) == 40 for out in outputs for output in out.outputs)
    assert shadow.num_expanded > 0
    assert sum(out.metrics.preemptions for out in outputs) > 0


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_chunks_hits_and_preemption_change_nothing_in_a_coded_format(form, make_llm) -> None:
    """Latents of 32 and rotary keys of 8 dims, coded apart; what is read does not depend on the way there."""
    want = None
    for limits in (
        {},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 18, "enable_prefix_caching": False},
    ):
        llm = make_llm("deepseek-v2", kv_cache_dtype=form, block_size=8, **limits)
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY)
            want = want or tokens(outputs)
            assert tokens(outputs) == want
        assert sum(output.metrics.preemptions for output in outputs) > 0 or "num_blocks" not in limits
        assert_idle(llm)


@pytest.mark.parametrize("policy", ["critical", "critical(snapkv)", "pyramidkv(critical(snapkv))"])
@LATENT
def test_policies_that_need_each_heads_values_are_refused(family, policy, shared_llm) -> None:
    with pytest.raises(InvalidArgumentError, match=r"policy .* keeps one latent for all heads") as refusal:
        shared_llm(family).generate(PROMPTS[:1], GREEDY, small(policy))
    assert "without critical" in str(refusal.value)
    assert_idle(shared_llm(family))


def test_statistics_of_expanded_queries_are_refused(calibrated_dir, shared_llm, monkeypatch) -> None:
    monkeypatch.setattr(loader, "use_latent_cache", lambda model: "")
    expanded = loader.load_model(calibrated_dir("deepseek-v3"), dtype="float32", device="cpu")
    assert not expanded.facts.layers[0].latent
    stats = calibrate(expanded, tiny.prompts((40,)), num_centers=2)
    with pytest.raises(StatsMismatchError):
        shared_llm("deepseek-v3").generate(PROMPTS[:1], GREEDY, small(stats=stats))


@LATENT
def test_an_expanded_cache_answers_alike(family, calibrated_dir, expected, monkeypatch) -> None:
    monkeypatch.setattr(loader, "use_latent_cache", lambda model: "")
    llm = LLM(calibrated_dir(family), dtype="float32", device="cpu", num_blocks=60)
    assert llm.engine.cache.num_kv_heads == 4
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected(family)


V3 = {  # the shape of a layer's attention in DeepSeek-V3; the cache does not depend on the number of heads
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V3_BYTES = 70_272
"""61 layers of 512 + 64 numbers in bf16."""


@pytest.fixture(scope="module")
def v3_llm(tmp_path_factory) -> LLM:
    small_rest = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16, "q_lora_rank": 8}
    path = tmp_path_factory.mktemp("v3-shape")
    no_experts = {"first_k_dense_replace": 61, "intermediate_size": 16}
    tiny.build("deepseek-v3", **V3, **small_rest, **no_experts).to(torch.bfloat16).save_pretrained(path)
    return LLM(path, device="cpu", dtype="bfloat16", num_blocks=3, block_size=16)


def test_a_pool_at_the_shape_of_v3_takes_the_bytes_of_the_formula(v3_llm) -> None:
    cache, facts = v3_llm.engine.cache, v3_llm.loaded.facts
    assert isinstance(v3_llm.loaded.model.config, DeepseekV3Config)
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.v_head_dim) == (61, 1, 576, 512)
    held = sum(plane.nbytes for plane in cache.planes)
    assert held == 3 * 16 * V3_BYTES
    assert cache.bytes_per_block == 16 * V3_BYTES
    assert FORMATS["bf16"].bytes_per_block(facts.layers, 16) == 16 * V3_BYTES
    expanded = LayerFacts(128, 128, 192, 128, Softmax(1.0))
    assert FORMATS["bf16"].bytes_per_block((expanded,) * 61, 1) / V3_BYTES == pytest.approx(71.1, abs=0.1)


def test_the_shape_of_v3_runs(v3_llm) -> None:
    (out,) = v3_llm.generate(PROMPTS[1:2], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert out.error is None
    assert len(out.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("form", "per_token"),
    [
        ("fp32", 140_544),
        ("fp16", V3_BYTES),
        ("int8", 35_319),
        ("fp8_e4m3", 35_319),
        ("int4", 19_764),
        ("turboquant4", 17_751),
    ],
)
def test_bytes_of_the_coded_formats_at_the_shape_of_v3(form, per_token) -> None:
    layers = (LayerFacts(128, 1, 576, 512, Softmax(1.0), latent=True),) * 61
    like = torch.empty(0, dtype=torch.bfloat16)
    cache = reference.allocate(layers, 2, 16, like=like, kv_format=FORMATS[form])
    assert cache.bytes_per_block == sum(plane.nbytes for plane in cache.planes) / 2
    assert cache.bytes_per_block == FORMATS[form].bytes_per_block(layers, 16) == 16 * per_token
