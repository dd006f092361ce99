"""A field of the config counts for the blocks, or it changes no query, key or value; a config alone gives the
frequencies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from one_text import OneText
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedConfig, T5Config

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.config_fields import NAMES, config_fields, measured_fields
from kvreclaim.model.loader import load_model
from kvreclaim.model.overrides import overridden
from kvreclaim.model.probe import fingerprint
from kvreclaim.model.rotation import frequencies_in, rotary_frequencies
from kvreclaim.ops.rope_probe import POSITIONS, find_rope

TOKENS = torch.tensor(tiny.prompts((40,), seed=3))
LEFT_OUT = {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "max_position_embeddings", "dtype"}
"""Fields on which query statistics do not depend."""


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return [*value, 1]
    return {"one": 1} if isinstance(value, dict) else 3


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.SCALED, *tiny.HYBRIDS])
def test_every_field_but_names_counts(family: str) -> None:
    config = tiny.config(family)
    before, measured = config_fields(config), measured_fields(config)
    fields = config.to_dict()
    assert set(fields) - set(before) <= NAMES
    assert set(before) - set(measured) <= LEFT_OUT
    assert {"rms_norm_eps", "layer_norm_epsilon", "norm_eps"} & set(measured)

    class Changed:
        def __init__(self, name: str) -> None:
            self.changed = {**fields, name: other(fields[name])}

        def to_dict(self) -> dict[str, Any]:
            return self.changed

        def get_text_config(self) -> Any:
            return config

    for name in fields:
        assert (config_fields(Changed(name)) != before) == (name not in NAMES), name
        assert (measured_fields(Changed(name)) != measured) == (name in measured), name


def test_fields_of_configs_within_count() -> None:
    config = tiny.config("llama")
    before = config_fields(config)
    config.rope_parameters["rope_theta"] = 7.0
    assert config_fields(config) != before
    config.rope_parameters = {"rope_type": "yarn"}
    assert "max_position_embeddings" in measured_fields(config)


def calls(path, **changes: Any) -> list[torch.Tensor]:
    loaded, text = load_model(path, dtype="float32", device="cpu", hf_overrides=changes), OneText()
    positions = torch.arange(TOKENS.shape[1])[None]
    loaded.model(input_ids=TOKENS, position_ids=positions, use_cache=False, kv_batch=text)
    return [tensor for call in text.calls for tensor in (call.q, call.k, call.v)]


@pytest.mark.parametrize("family", ["llama", "llama-linear", "qwen3-moe", "gemma2", "gpt-oss", "phi3"])
@torch.inference_mode()
def test_fields_that_do_not_count_change_nothing(family: str, tiny_dir) -> None:
    path, config = tiny_dir(family), tiny.config(family)
    wanted = calls(path)
    skipped = (set(config_fields(config)) - set(measured_fields(config))) - {"dtype"}
    assert skipped == LEFT_OUT - {"dtype"} - (set() if family != "gpt-oss" else {"max_position_embeddings"})
    for name in skipped:
        given = getattr(config, name)
        changed = {name: 2 if given is None else other(given)}
        assert measured_fields(overridden(config, changed, family)) == measured_fields(config)
        for ours, theirs in zip(calls(path, **changed), wanted, strict=True):
            assert torch.equal(ours, theirs), name


SERVED = (*tiny.FAMILIES, *tiny.SCALED)


class Recorder:
    """OutputProcessor each layer with the values, and remembers its keys."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.keys[call.layer] = call.k
        return call.v.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SERVED)
def test_a_config_gives_the_models_frequencies_and_fingerprint(family, dtype, tiny_dir) -> None:
    loaded = load_model(tiny_dir(family), dtype=dtype, device="cpu")
    config = tiny.config(family)
    frequencies = rotary_frequencies(config)
    own = frequencies_in(loaded.model)
    assert [f.tolist() for f in frequencies] == [f.tolist() for f in own]
    recorder = Recorder()
    token = torch.full((1, len(POSITIONS)), 5)
    with torch.inference_mode():
        loaded.model(token, position_ids=torch.tensor([POSITIONS]), use_cache=False, kv_batch=recorder)
    layers = [
        replace(layer, rope=find_rope(None, recorder.keys[n], frequencies))
        for n, layer in enumerate(loaded.facts.layers)
    ]
    assert fingerprint(config, layers) == loaded.facts.fingerprint


def test_layers_may_turn_at_different_frequencies() -> None:
    fields = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
    kinds = ["sliding_attention", "full_attention"]
    found = rotary_frequencies(Gemma3TextConfig(**fields, vocab_size=64, layer_types=kinds))
    bands = -torch.arange(8, dtype=torch.float64) / 8
    assert len(found) == 2
    for base, frequencies in zip((1e4, 1e6), sorted(found, key=lambda f: -float(f[-1])), strict=True):
        torch.testing.assert_close(frequencies, base**bands, atol=1e-7, rtol=1e-6)


def test_a_model_without_rotation_has_none() -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, bos_token_id=None, eos_token_id=None)
    assert rotary_frequencies(config) == []


def test_the_config_is_left_as_it_is() -> None:
    config = tiny.config("llama-yarn")
    before = config.to_dict()
    rotary_frequencies(config)
    assert config.to_dict() == before


@pytest.mark.parametrize("config", [T5Config(), PreTrainedConfig()], ids=["t5", "unknown"])
def test_a_config_without_a_causal_model_is_refused(config) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"no causal model of .* use a policy that needs no query"
    ):
        rotary_frequencies(config)


def test_a_config_that_makes_no_model_is_refused() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    config.rope_parameters = {"rope_type": "strange"}
    with pytest.raises(UnsupportedModelError, match=r"of llama cannot be told .*KeyError"):
        rotary_frequencies(config)


def test_a_model_beyond_all_memory_is_not_allocated() -> None:
    """Some 8 TB of weights."""
    size = {"hidden_size": 1 << 17, "intermediate_size": 1 << 19, "num_hidden_layers": 8}
    config = LlamaConfig(**size, num_attention_heads=1024)
    assert [f.shape for f in rotary_frequencies(config)] == [(64,)]
