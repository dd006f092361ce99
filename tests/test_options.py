"""Bounds of settings: what a declaration says, the config holds, in one sentence."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression_settings import CompressionSettings, parse_budget
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.options import Setting, settings_of
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.speculation import SpeculativeConfig, from_json

CONFIGS = (EngineConfig, SamplingParams, CompressionSettings, CompressionConfig, ServerConfig)
NEEDED: dict[type, dict[str, Any]] = {ServerConfig: {"served_model_name": ("m",)}}
ROOM: dict[str, dict[str, Any]] = {
    "budget": {"sinks": 0, "recent": 0},
    "content": {"max_loss": 0.5},
    "max_tokens": {"min_tokens": 0},
    "temperature": {"n": 1},
}
"""What another setting must be for one to reach its bound."""
ALL = [
    pytest.param(config, setting, id=f"{config.__name__}.{setting.name}")
    for config in CONFIGS
    for setting in settings_of(config).values()
]


def make(config: type, setting: Setting, value: Any) -> Any:
    given = {**NEEDED.get(config, {}), **ROOM.get(setting.name, {}), setting.name: value}
    return config(**given)


def refused(config: type, setting: Setting, value: Any) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        make(config, setting, value)
    assert str(caught.value).endswith(".")
    return str(caught.value)


@pytest.mark.parametrize(("config", "setting"), ALL)
def test_a_setting_stays_within_what_its_declaration_says(config: type, setting: Setting) -> None:
    spec, name = setting.spec, setting.name
    if setting.optional:
        assert getattr(make(config, setting, None), name) is None
    if spec.choices:
        assert getattr(make(config, setting, spec.choices[-1]), name) == spec.choices[-1]
        sentence = refused(config, setting, "nonesuch")
        assert sentence == f"{name} is 'nonesuch'; it must be one of {', '.join(spec.choices)}."
    elif setting.type is bool:
        assert getattr(make(config, setting, not setting.default), name) is not setting.default
        assert refused(config, setting, 1) == f"{name} is 1; it must be true or false."
    elif setting.type is int:
        assert getattr(make(config, setting, spec.low), name) == spec.low
        below = spec.low - 1
        sentence = f"{name} is {below}; it must be an integer >= {spec.low}{spec.unit}."
        if name == "budget":  # tokens or a share, by a parser of its own
            with pytest.raises(InvalidArgumentError) as caught:
                parse_budget(below)
            sentence = str(caught.value)
        assert refused(config, setting, below) == sentence
        assert name in refused(config, setting, True)
    elif setting.type is float:
        for bound in (spec.low, spec.high):
            assert getattr(make(config, setting, bound), name) == bound
        for beyond in (spec.low - 1, spec.high + 1, float("nan")):
            sentence = f"{name} is {beyond}; it must be a number from {spec.low} to {spec.high}."
            assert refused(config, setting, beyond) == sentence


@pytest.mark.parametrize("config", CONFIGS)
def test_a_number_has_a_declaration(config: type) -> None:
    """Else nothing would check it."""
    loose = {f.name for f in dataclasses.fields(config) if f.init} - {*settings_of(config)}
    numbers = {f.name for f in dataclasses.fields(config) if isinstance(f.default, int | float)}
    assert not loose & numbers


def test_a_config_has_the_settings_that_are_known_without_torch() -> None:
    """CompressionConfig adds what needs policies: statistics as an object, the policy's own options."""
    known = {f.name for f in dataclasses.fields(CompressionConfig)}
    derived = ("auto_budget", "budget_share")
    assert known == {*settings_of(CompressionSettings), "options", "policy_object", *derived}
    assert set(settings_of(CompressionConfig)) == {*settings_of(CompressionSettings)} - {"stats"}


def test_names_of_others_for_swapping_and_for_its_room() -> None:
    config = EngineConfig(kv_offloading_size=1.0, preemption_mode="offload")
    assert config.preemption_mode == "swap"
    assert EngineConfig(**dataclasses.asdict(config)) == config
    with pytest.raises(InvalidArgumentError, match="kv_offloading_size is 0"):
        EngineConfig(preemption_mode="offload")
    flags = settings_of(EngineConfig)["kv_offloading_size"].spec.flags
    assert flags == ("--kv-offloading-size", "--hicache-size")


def test_a_dict_json_and_the_object_are_one():
    fields = {"method": "ngram", "num_speculative_tokens": 4}
    ways = (fields, json.dumps(fields), SpeculativeConfig(num_speculative_tokens=4))
    found = {EngineConfig(speculative_config=way).speculative_config for way in ways}
    assert len(found) == 1
    assert from_json(found.pop()) == SpeculativeConfig(num_speculative_tokens=4)


def test_nothing_is_none():
    assert EngineConfig().speculative_config is None
    assert from_json(None) is None


def test_a_short_lookup_alone_shortens_the_least():
    found = from_json(EngineConfig(speculative_config={"prompt_lookup_max": 1}).speculative_config)
    assert found is not None
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (1, 1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("{", "pass a dict, or JSON"),
        ([1], "pass a dict, or JSON"),
        ({"method": "eagle"}, "one of ngram, draft_model"),
        ({"draft_tensor_parallel_size": 1}, "its fields are method"),
        ({"num_speculative_tokens": 0}, ">= 1"),
        ({"num_speculative_tokens": 65}, "<= 64"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "above prompt_lookup_max"),
        ({"method": "draft_model"}, "no model"),
        ({"method": "draft_model", "model": 3}, "pass a directory"),
        ({"model": "x"}, "uses none"),
    ],
)
def test_a_mistake_is_one_sentence(given, sentence):
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(speculative_config=given)
    assert sentence in str(caught.value)
