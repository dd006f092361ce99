"""The options of the plugin for vLLM, and the errors of wrong ones."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvreclaim.checks import require
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policy import CompressionPolicy
from kvreclaim.compression.registry import policy_names
from kvreclaim.compression.trial import Trial, TrialOutcome, TrialScore
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.settings.layer_needs import WATCHED
from kvreclaim.integrations.vllm.settings.max_loss import density_of
from kvreclaim.integrations.vllm.settings.options import Options, is_bounded
from kvreclaim.testing.toys import model_facts, query_stats

PLAIN = {"policy": "streaming_llm", "budget": 512, "interval": 64}
FULL = PLAIN | {
    "sinks": 8,
    "recent": 32,
    "protect_prompt": True,
    "protect_system": False,
    "mode": "per_head",
    "stats": "here.safetensors",
    "calibrate": False,
    "options": {},
    "max_loss": None,
    "content": None,
    "opt_in": True,
    "snapshots": True,
    "page_port": 8700,
    "page_host": "::1",
}


def read(**fields: Any) -> Options:
    return Options.read({**PLAIN, **fields}, "the test")


@pytest.mark.parametrize("config", [None, {}, {"other": 1}, object(), "text"])
def test_without_options_there_is_no_compression(config: object) -> None:
    assert Options.find(config, {}) is None


def test_every_field_arrives_and_survives_json_and_pickle() -> None:
    options = Options.find({"kv_compression": FULL}, {})
    assert options is not None
    assert options.as_json() == FULL
    plain = json.loads(json.dumps(options.as_json()))
    assert Options.find({"kv_compression": plain}, {}) == options
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options.settings) == hash(replace(options.settings))


def test_the_variable_is_the_same_object_as_json() -> None:
    options = Options.find({}, {"KVRECLAIM_VLLM": json.dumps(FULL)})
    assert options == Options.read(FULL, "the test")
    assert Options.find({"kv_compression": FULL}, {"KVRECLAIM_VLLM": json.dumps(FULL)}) == options


@pytest.mark.parametrize(
    ("config", "variable", "words"),
    [
        ({"kv_compression": PLAIN}, json.dumps(FULL), "ask for different things; keep one"),
        (object(), json.dumps(FULL), "additional_config is object, which cannot carry it"),
        ({}, "", "KVRECLAIM_VLLM is '', which is no JSON"),
        ({}, "[1]", r"KVRECLAIM_VLLM is \[1\]; it must be an object"),
    ],
)
def test_a_variable_that_cannot_be_followed(config: object, variable: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        Options.find(config, {"KVRECLAIM_VLLM": variable})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"buget": 3}, "has no field 'buget'; its fields are policy, budget, interval"),
        ({"budget": "much"}, "budget is 'much'; it must be at least 1 token"),
        ({"budget": 100}, r"sinks \+ recent = 132"),
        ({"interval": 0}, "interval is 0"),
        ({"page_port": "8700"}, "page_port in the test is '8700'; it must be 1 to 65535, or 0"),
        ({"page_port": True}, "page_port in the test is True"),
        ({"page_port": 65_536}, "page_port in the test is 65536"),
        ({"page_host": "::1"}, "page_host in the test is '::1', but no page_port is named"),
        ({"page_port": 1, "page_host": 7}, "page_host in the test is 7; it must be a name or an address"),
        ({"policy": "nonsense"}, "policy 'nonsense' is unknown"),
        ({"policy": 3}, "policy 3 is no name"),
        ({"mode": "all"}, "mode is 'all'"),
        ({"options": {"x": 1}}, "has no option 'x'"),
        ({"options": [1]}, r"options is \[1\]"),
        ({"options": {"x": object()}}, "cannot be read"),
        ({"stats": 3}, "stats in the test is 3; it must be the path"),
        ({"opt_in": "yes"}, "opt_in in the test is 'yes'"),
        ({"snapshots": 1}, "snapshots in the test is 1"),
        ({"policy": "query_mixture"}, "needs query statistics; name a file"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        read(**fields)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("h2o", "the attention that each token has received"),
        ("critical", "the weights of the output projection"),
        ("oracle", "the queries still to come"),
        ("kvzip", "the prompt once more"),
        ("paged_eviction", "evicts whole blocks"),
        ("quest", "reads some blocks only"),
        ("streaming_llm(positions=cache)", "turns keys"),
    ],
)
def test_policies_that_want_what_vllm_has_not(policy: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        read(policy=policy, stats="here.safetensors")


def test_every_policy_is_either_taken_or_refused_with_a_reason() -> None:
    taken = set()
    for name in policy_names():
        try:
            taken.add(read(policy=name, stats="here.safetensors").settings.policy)
        except InvalidArgumentError as error:
            refused = str(error)
        else:
            continue
        assert "inside vLLM use" in refused or "needs the option" in refused
    assert taken >= {
        "query_mixture",
        "triattention",
        "expected_attention",
        "knorm",
        "keydiff",
        "lagkv",
        "random",
        "streaming_llm",
        "full",
    }


def test_a_request_may_say_off_on_or_what_it_wants() -> None:
    options = read()
    assert options.of_request(None) == options.of_request({}) == options.settings
    assert options.of_request({"other": 1}) == options.settings
    assert options.of_request({"kv_compression": "off"}) is None
    assert options.of_request({"kv_compression": '"off"'}) is None
    assert options.of_request({"kv_compression": "on"}) == options.settings
    smaller = replace(options.settings, budget=300, protect_prompt=True)
    assert options.of_request({"kv_compression": {"budget": 300, "protect_prompt": True}}) == smaller
    assert options.of_request({"kv_compression": '{"budget": 300, "protect_prompt": true}'}) == smaller
    assert options.of_request({"kv_compression": {"policy": "full"}}) is None


def test_with_opt_in_silence_means_off() -> None:
    options = read(opt_in=True)
    assert options.of_request(None) is None
    assert options.of_request({"kv_compression": "on"}) == options.settings
    smaller = replace(options.settings, budget=300)
    assert options.of_request({"kv_compression": {"budget": 300}}) == smaller


def test_another_policy_does_not_inherit_options() -> None:
    options = read(policy="random", options={"seed": 3})
    settings = options.of_request({"kv_compression": {"policy": "knorm"}})
    assert settings is not None
    assert (settings.policy, settings.options) == ("knorm", {})
    settings = options.of_request({"kv_compression": {"budget": 300}})
    assert settings is not None
    assert settings.options == {"seed": 3}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("of", "kv_compression is 'of', which is no JSON"),
        (3, "kv_compression is 3; it must be 'off', 'on' or an object"),
        ("[1]", r"kv_compression is \[1\]"),
        ({"budget": 513}, "budget is 513 tokens; this server was started with 512"),
        ({"interval": 65}, "interval is 65 tokens; this server was started with 64"),
        ({"budget": 0}, "budget is 0"),
        ({"stats": "x"}, "no field 'stats'; statistics are loaded when the server starts"),
        ({"opt_in": True}, "no field 'opt_in'"),
        ({"policy": "triattention"}, "needs query statistics that this server"),
        ({"policy": "snapkv"}, "looks at the last 32 queries, and this server, started with '.*', keeps 0"),
        ({"policy": "kvzap"}, "needs query statistics that this server"),
    ],
)
def test_what_a_request_may_not_say(wanted: object, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        read().of_request({"kv_compression": wanted})


def test_statistics_of_the_servers_policy_serve_policies_that_need_no_more() -> None:
    options = read(policy="query_mixture", stats="here.safetensors")
    for policy in ("triattention", "knorm"):
        settings = options.of_request({"kv_compression": {"policy": policy}})
        assert settings is not None
        assert settings.policy == policy
    with pytest.raises(InvalidArgumentError, match="has not loaded"):
        read(policy="triattention", stats="x").of_request({"kv_compression": {"policy": "query_mixture"}})


def test_a_server_that_keeps_everything_sets_no_limit() -> None:
    options = read(policy="full")
    assert options.of_request(None) is None
    settings = options.of_request({"kv_compression": {"policy": "knorm", "budget": 4096}})
    assert settings is not None
    assert settings.budget == 4096


def test_most_tokens_is_budget_interval_and_a_chunk() -> None:
    options = Options(CompressionConfig(policy="knorm", budget=512, interval=64))
    assert options.bound(32, 2048) == 512 + 63 + 2048
    assert options.bound(128, 2048) == 512 + 127 + 2048
    assert is_bounded(options.settings)
    whole = replace(options, settings=replace(options.settings, policy="full"))
    assert whole.bound(32, 2048) is None
    assert not is_bounded(whole.settings)
    assert read().bound(32, 256) == 512 + 63 + 256


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        ("auto", 192),  # a fifth of 1,000 tokens, in blocks
        ("bfloat16", 192),
        ("fp8_e5m2", 400),
        ("int8_per_token_head", 20 * 1000 * 128 * 16 // 100 // (128 * 8 + 32) // 16 * 16),
        ("int4_per_token_head", 20 * 1000 * 128 * 16 // 100 // (128 * 4 + 32) // 16 * 16),
    ],
)
def test_a_share_is_of_the_bytes_in_the_models_dtype(dtype, tokens) -> None:
    options = replace(read(policy="knorm", budget="20%"), density=density_of(vllm_config(dtype)))
    assert options.of_prompt(options.of_request(None), 1000, 16).budget == tokens


def test_a_share_is_refused_where_layers_take_different_bytes() -> None:
    options = replace(read(policy="knorm", budget="20%"), density=density_of(vllm_config("turboquant_k8v4")))
    with pytest.raises(InvalidArgumentError, match="layers of this KV cache dtype take different bytes"):
        options.of_prompt(options.of_request(None), 1000, 16)
    assert options.of_prompt(options.of_request({"kv_compression": {"budget": 512}}), 1000, 16).budget == 512


def test_a_requests_share_is_held_to_the_servers_tokens() -> None:
    """Its budget is known with the prompt; a server that has a share itself sets no limit."""
    tokens, share = read(policy="knorm", budget=512), read(policy="knorm", budget="5%")
    settings = tokens.of_request({"kv_compression": {"budget": "20%"}})
    assert tokens.of_prompt(settings, 1000, 16).budget == 192
    assert tokens.of_prompt(settings, 2639, 16).budget == 512
    with pytest.raises(
        InvalidArgumentError, match=r"budget 20% takes 528 tokens for this prompt, .* with 512"
    ):
        tokens.of_prompt(settings, 2640, 16)
    assert share.of_prompt(share.of_request({"kv_compression": {"budget": "20%"}}), 9000, 16).budget == 1792
    assert share.of_request({"kv_compression": {"policy": "full"}}) is None
    with pytest.raises(InvalidArgumentError, match="policy 'full' keeps every token, and budget"):
        share.of_request({"kv_compression": {"policy": "full", "budget": "20%"}})
    with pytest.raises(InvalidArgumentError, match="give a share up to 100%"):
        tokens.of_request({"kv_compression": {"budget": "200%"}})


def vllm_config(cache_dtype: str) -> Any:
    """A model in bf16 with heads of 128."""
    model = SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: 128)
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype), model_config=model)


class TestAuto:
    """The best of the trial that goes inside vLLM, unequal heads among them; other processes get its
    name."""

    @pytest.fixture
    def file(self, tmp_path) -> str:
        def outcome(policy: str, once: float) -> TrialOutcome:
            return TrialOutcome(
                policy=policy, fraction=0.2, budget=64, once=once, once_right=0, again=1, again_right=0
            )

        losses = {
            "h2o": 0.9,
            "snapkv": 1.0,
            "knorm(keep=large)": 1.2,
            "query_mixture": 1.1,
            "shares(surrogate)": 1.05,
        }
        rows = tuple(outcome(policy, loss) for policy, loss in losses.items())
        full = TrialScore(once=1, once_right=0, again=1, again_right=0)
        found = Trial(documents=1, tokens=320, full=full, outcomes=rows)
        path = tmp_path / "trial.safetensors"
        query_stats(model_facts(2)).with_trial(found).save(path)
        return str(path)

    def test_is_the_best_that_vllm_has_all_for(self, file) -> None:
        assert read(policy="auto", stats=file).settings.policy == "snapkv"

    def test_is_the_best_that_this_vllm_serves(self, file) -> None:
        def serves(policy: CompressionPolicy, *, snapshots: bool) -> None:
            require(not snapshots or not policy.needs & WATCHED, "not beside snapshots")

        fields = {**PLAIN, "policy": "auto", "stats": file, "snapshots": True}
        options, best = Options.read(fields, "the test", serves=serves), "shares(surrogate)"
        assert options.settings.policy == options.as_json()["policy"] == best
        assert options.has_cells
        again = Options.read({"budget": 512, "stats": file, "snapshots": True}, "the test", serves=serves)
        assert again.settings.policy == best
        settings = options.of_request({"kv_compression": {"policy": "auto", "budget": 300}})
        assert (settings.policy, settings.budget) == (best, 300)

    def test_without_statistics_or_trial_says_what_to_name(self, tmp_path) -> None:
        with pytest.raises(InvalidArgumentError, match=r'no statistics are named: name a file .* as "stats"'):
            read(policy="auto")
        path = tmp_path / "bare.safetensors"
        query_stats(model_facts(2)).save(path)
        with pytest.raises(
            InvalidArgumentError, match="hold no trial, which policy auto needs; name a policy"
        ):
            read(policy="auto", stats=str(path))
