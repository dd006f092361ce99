"""What a config.json leaves out is what transformers' class of the model_type takes instead: every field that
the planner reads, of every family that it knows."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_planned_families import fields
from test_shapes import on_meta
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from kvreclaim.errors import KVReclaimError
from kvreclaim.plan.configs import load_shape, shape_of
from kvreclaim.plan.families import COMPOSITE, DEFAULTS, FAMILIES
from kvreclaim.plan.shapes import ModelShape

SCRIPT = Path(__file__).parents[2] / "scripts" / "docs.py"
NEEDED = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "ministral": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["attention", "mamba"] * 16},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
}
"""What a class has no default for, and a model cannot do without."""

ONLY_THERE = {(kind, "num_attention_heads") for kind in ("minicpm3", "iquestcoder", "jais2")}
"""What a class refuses and the planner does not: heads that do not divide the hidden size."""
UNREAD = ("dtype", "transformers_version", "time_step_limit")


class RecordingConfig(dict):
    """A config that records which keys are read."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.keys_read: dict[str, None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read[key] = None
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read[key] = None
        return super().__getitem__(key)


def whole(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config that transformers makes of these fields: all of its own, too, but for UNREAD."""
    complete = json.loads(CONFIG_MAPPING[kind](**config).to_json_string(use_diff=False))
    return {key: value for key, value in complete.items() if key not in UNREAD}


def answer(config: dict[str, Any]) -> ModelShape | str:
    """Return the shape, without its notes, or the error's message."""
    try:
        return replace(shape_of(config, "m"), notes=())
    except KVReclaimError as error:
        return str(error)


def class_answer(kind: str, config: dict[str, Any]) -> ModelShape | str | None:
    """Return the answer to the config that the class makes of these fields; None where it refuses them."""
    try:
        return answer(whole(kind, config))
    except Exception:  # a class has checks of several kinds
        return None


def bases(kind: str) -> Iterator[dict[str, Any]]:
    """A small config as files have it, and one with every field of the class."""
    small = fields(kind)
    yield {"model_type": kind, **small}
    yield whole(kind, small)


def read(base: dict[str, Any]) -> list[str]:
    """Return the fields of the config that the planner reads."""
    config = RecordingConfig(base)
    shape_of(config, "m")
    return [key for key in config.keys_read if key in base and key != "model_type"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_field_that_is_left_out_is_the_classes(kind: str) -> None:
    """What the class then refuses, such as types of other layers than there are, the planner refuses, too; a
    null that the class takes is read as there."""
    for base in bases(kind):
        assert len(read(base)) >= 4
        for key in read(base):
            partial = {name: value for name, value in base.items() if name != key}
            if (oracle := class_answer(kind, partial)) is None:
                assert isinstance(answer(partial), str) is ((kind, key) not in ONLY_THERE), key
            else:
                assert answer(partial) == oracle, key
            if (oracle := class_answer(kind, base | {key: None})) is not None:
                assert answer(base | {key: None}) == oracle, f"{key} is null"


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_config_that_says_nothing_is_the_classes(kind: str) -> None:
    """The heads, windows and weights are those of the model that transformers builds of the config."""
    needed = NEEDED.get(kind, {})
    config = CONFIG_MAPPING[kind](**needed)
    shape, model = answer({"model_type": kind, **needed}), on_meta(config)
    assert shape == answer(whole(kind, needed))
    assert shape.num_params == model.num_parameters()
    assert {layer.num_heads for layer in shape.attention} == {config.num_attention_heads}
    assert shape.max_position == getattr(config, "max_position_embeddings", shape.max_position)
    if not FAMILIES[kind].latent:
        kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        assert {layer.num_kv_heads for layer in shape.attention} == {1 if FAMILIES[kind].one_kv else kv_heads}


@pytest.mark.parametrize("kind", COMPOSITE)
@pytest.mark.parametrize("tied", [None, True, False])
def test_a_language_model_within_another_is_the_classes(kind: str, tied: bool | None) -> None:
    """The inner config is left out or has no fields; which tie counts is as in the model that is built."""
    outer = {} if tied is None else {"tie_word_embeddings": tied}
    for inner in ({}, {"text_config": {"tie_word_embeddings": True}}):
        config = CONFIG_MAPPING[kind](**json.loads(json.dumps({**outer, **inner})))
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        ours = [p for name, p in model.named_parameters() if "language_model" in name or "lm_head" in name]
        shape = shape_of({"model_type": kind, **outer, **inner}, "m")
        assert shape.num_params == sum(parameter.numel() for parameter in ours)
        text = config.text_config
        assert {layer.num_kv_heads for layer in shape.attention} == {text.num_key_value_heads}
        assert (shape.num_layers, shape.max_position) == (
            text.num_hidden_layers,
            text.max_position_embeddings,
        )


def test_as_published(tmp_path: Path) -> None:
    """google/gemma-3-4b-it leaves its heads and its vocabulary out."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_shape(tmp_path)
    layers = {(x.num_heads, x.num_kv_heads, x.head_dim) for x in shape.layers}
    assert (layers, shape.vocab_size, shape.tied) == ({(8, 4, 256)}, 262_208, True)
    assert [layer.window for layer in shape.layers[:7]] == [1024] * 5 + [None, 1024]


def test_the_file_of_defaults_is_what_the_script_finds() -> None:
    assert runpy.run_path(str(SCRIPT))["plan_defaults"]() == DEFAULTS
