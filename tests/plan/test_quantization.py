"""Bytes of quantised checkpoints, against the matrices that transformers builds, counted one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2MoeConfig

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.configs import load_shape, shape_of
from kvreclaim.plan.weights import weight_bytes, weight_format

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "dtype": "bfloat16",
}
CONFIG = {"model_type": "llama", **SIZES}


def groups(**weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors, as llm-compressor and ModelOpt write it."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FORMATS = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
    "gptq": ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
    "gptq by rows": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    "int4": (groups(**INT4), 4 + 16 / 32),
    "int4 with zero points": (groups(**INT4 | {"symmetric": False}), 4 + 20 / 32),
    "int8": (groups(num_bits=8, type="int", symmetric=True, strategy="channel"), 8),
    "fp8 by rows": (groups(num_bits=8, type="float", strategy="channel"), 8),
    "fp8 by tensors": (groups(num_bits=8, type="float", strategy="tensor"), 8),
    "fp8 by blocks": (groups(num_bits=8, type="float", strategy="block"), 8 + 32 / 128**2),
    "nvfp4": (groups(num_bits=4, type="float", strategy="tensor_group", group_size=16), 4.5),
    "mxfp4": (groups(num_bits=4, type="float", strategy="group", group_size=32), 4.25),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, 8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, 4.5),
    "modelopt awq": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128},
        4 + 16 / 128,
    ),
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
        4 + 20 / 64,
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
}


def matrices(model: torch.nn.Module) -> dict[str, int]:
    """Numbers of the linear layers, the head apart, by module."""
    found = ((name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear))
    return {name: part.weight.numel() for name, part in found if "head" not in name}


def planned(quantization: dict[str, Any]) -> int:
    shape = shape_of({**CONFIG, "quantization_config": quantization}, "m")
    return weight_bytes(shape, weight_format("auto", shape)).total


def counted(bits: float, left_out: tuple[str, ...] = ()) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    packed = {
        name: count
        for name, count in matrices(model).items()
        if not any(f".{each}." in f".{name}." for each in left_out)
    }
    num_packed = sum(packed.values())
    return round((model.num_parameters() - num_packed) * 2 + num_packed * bits / 8)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_every_method(name: str) -> None:
    quantization, bits = FORMATS[name]
    assert planned(quantization) == counted(bits)


LEFT = {
    "whole layers": (["model.layers.0.self_attn", "model.layers.0.mlp"], ("layers.0",)),
    "matrices": (
        [f"model.layers.3.self_attn.{x}_proj" for x in "qkvo"],
        ("layers.3.self_attn",),
    ),
    "an expression": (["lm_head", r"re:.*self_attn.*"], ("self_attn",)),
    "a pattern": (["model.layers.*.mlp", "model.norm"], ("mlp",)),
    "a word": (["self_attn", "model.embed_tokens"], ("self_attn",)),
    "nothing that is packed": (["lm_head", "model.layers.0.input_layernorm", "visual"], ()),
}


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore", "exclude_modules"])
@pytest.mark.parametrize("name", LEFT)
def test_modules_that_are_left_out_keep_their_bytes(name: str, key: str) -> None:
    modules, left_out = LEFT[name]
    assert planned({"quant_method": "fbgemm_fp8", key: modules}) == counted(8, left_out)
    shape = shape_of({**CONFIG, "quantization_config": {"quant_method": "fbgemm_fp8", key: modules}}, "m")
    assert weight_bytes(shape, weight_format("8", shape)).total == counted(8)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "odd"}, "quantization_config of method odd, so its bytes are not known here; say"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "of method gptq"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "of method modelopt"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]},
            "that leaves 'model.layers.0.self_attn.q_proj' in the model's dtype",
        ),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.9.mlp"]}, "leaves 'model.layers.9"),
    ],
)
def test_what_is_not_known_names_weights(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        planned(quantization)
    assert caught.value.field == "weights"
    shape = shape_of({**CONFIG, "quantization_config": quantization}, "m")
    assert weight_bytes(shape, weight_format("8", shape)).total == counted(8)


def test_experts_may_not_be_left_out_in_part() -> None:
    config = json.loads(Qwen2MoeConfig(**SIZES).to_json_string(use_diff=False))
    left = {"quant_method": "fp8", "ignore": ["re:.*experts.*"]}
    with pytest.raises(InvalidArgumentError, match="experts"):
        weight_format("auto", shape_of({**config, "quantization_config": left}, "m"))


def test_the_file_of_modelopt_beside_the_config(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    quantization = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    shape = load_shape(tmp_path)
    assert weight_bytes(shape, weight_format("auto", shape)).total == counted(8)
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(InvalidArgumentError, match=r"hf_quant_config.json' cannot be read"):
        load_shape(tmp_path)


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
def test_mtp_layers_are_named(key: str) -> None:
    plain, more = shape_of(CONFIG, "m"), shape_of({**CONFIG, key: 2}, "m")
    assert more.layers == plain.layers
    assert more.notes == (f"MTP layers ({key} = 2) are left out; speculative decoding alone loads them",)
    assert plain.notes == shape_of({**CONFIG, key: 0}, "m").notes == ()
