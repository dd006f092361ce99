"""A field of the config counts for the blocks, or it changes no query, key or value."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from one_text import OneText

from kvreclaim.model.config_fields import NAMES, config_fields, measured_fields
from kvreclaim.model.loader import load_model
from kvreclaim.model.overrides import overridden

TOKENS = torch.tensor(tiny.prompts((40,), seed=3))
LEFT_OUT = {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "max_position_embeddings", "dtype"}
"""Of what query statistics depend on."""


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
