"""A shape read from a config.json has the parameters and windows of the model that transformers builds."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.kv_bytes import KV_BYTES
from kvreclaim.plan.configs import ABOUT, bundled_models, load_shape, shape_of
from kvreclaim.plan.families import COMPOSITE, FAMILIES
from kvreclaim.plan.weights import WEIGHTS, weight_bytes, weight_format

FILES = sorted({*bundled_models().values()})
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHARED = ("mistral", "mixtral", "phi3")


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def windows_of(model) -> list[int | None]:
    """Return the window of each layer's attention; one that all layers share is in the config alone."""
    if model.config.model_type == "llama4_text":
        chunk = model.config.attention_chunk_size
        return [chunk if kind == "chunked_attention" else None for kind in model.config.layer_types]
    if FAMILIES[model.config.model_type].mixer:
        return [None] * model.config.num_hidden_layers
    shared = model.config.sliding_window if model.config.model_type in SHARED else None
    found = [getattr(layer.self_attn, "sliding_window", shared) for layer in model.model.layers]
    return [window or None for window in found]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_bundled_configs_are_what_transformers_makes_of_them(path) -> None:
    fields = json.loads(path.read_text())
    about = fields.pop(ABOUT)
    assert about["date"]
    assert about["source"].startswith(f"https://huggingface.co/{about['names'][0]}")
    fields.pop("quantization_config", None)
    config = CONFIG_MAPPING[fields["model_type"]](**{k: v for k, v in fields.items() if k != "model_type"})
    shape, model = load_shape(path), on_meta(config.get_text_config())
    assert shape.num_params == model.num_parameters()
    assert [layer.window for layer in shape.layers] == windows_of(model)
    assert shape.max_position == config.get_text_config().max_position_embeddings


@pytest.mark.parametrize(
    ("name", "params", "active", "per_token"),
    [
        ("Llama-3.1-8B", 8.030, 7.505, 128),
        ("meta-llama/Llama-3.1-70B", 70.554, 69.503, 320),
        ("qwen/qwen3-8b", 8.191, 7.568, 144),
        ("Qwen3-32B", 32.762, 31.984, 256),
        ("DeepSeek-V3", 671.026, 36.626, 68.625),
        ("gpt-oss-120b", 116.829, 5.133, 72),
        ("gpt-oss-20b", 20.915, 3.608, 48),
        ("gemma-3-27b-it", 27.009, 27.009, 496),
    ],
)
def test_public_models(name: str, params: float, active: float, per_token: float) -> None:
    """Billions of parameters, and of those that a token reads; KiB per token in bf16."""
    shape = load_shape(name)
    assert round(shape.num_params / 1e9, 3) == params
    assert round(shape.active_params / 1e9, 3) == active
    assert shape.block_bytes(KV_BYTES["bf16"], 16) == per_token * 1024 * 16


def test_weights_in_four_bits() -> None:
    shape = load_shape("Qwen/Qwen3-32B")
    sizes = weight_bytes(shape, weight_format("awq4", shape))
    assert round(sizes.total / 1e9, 3) == 19.325
    assert round(sizes.total / 2**30, 3) == 17.998
    assert sizes.total == weight_bytes(shape, weight_format("4.15625", shape)).total
    assert weight_bytes(shape, WEIGHTS["bf16"]).total == 2 * shape.num_params
    # OpenAI's files of gpt-oss-120b are 60.8 GiB
    assert round(weight_bytes(load_shape("gpt-oss-120b"), WEIGHTS["mxfp4"]).total / 2**30, 1) == 60.8


def test_the_quantization_of_a_config_is_taken_or_refused() -> None:
    base = {"model_type": "llama", "dtype": "float16", **SMALL}
    awq = shape_of({**base, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}, "m")
    assert weight_format("auto", awq).bits == 4 + 20 / 64
    odd = shape_of({**base, "quantization_config": {"quant_method": "odd"}}, "m")
    with pytest.raises(InvalidArgumentError, match="quantization_config of method odd"):
        weight_format("auto", odd)
    assert weight_format("nf4", odd).bits == 4.5
    with pytest.raises(InvalidArgumentError, match="--weights is 'int3'"):
        weight_format("int3", odd)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"model_type": "mamba"}, UnsupportedModelError, "'mamba', a recurrent model without"),
        ({}, UnsupportedModelError, "model_type None"),
        ({"model_type": "deepseek_v2"}, InvalidArgumentError, "lacks num_experts_per_tok"),
        ({"model_type": "llama", **SMALL, "hidden_size": "64"}, InvalidArgumentError, "hidden_size is '64'"),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": 10**9}, InvalidArgumentError, "too many"),
        (
            {"model_type": "llama", **SMALL, "kv_lora_rank": 16},
            UnsupportedModelError,
            "has kv_lora_rank = 16",
        ),
        ({"model_type": "hunyuan_v1_moe", **SMALL, "use_cla": True}, UnsupportedModelError, "has use_cla"),
        ({"model_type": "qwen2", **SMALL, "num_experts": 8}, UnsupportedModelError, "has num_experts = 8"),
        (
            {"model_type": "gemma2", **SMALL, "layer_types": ["full_attention", "ssm"]},
            UnsupportedModelError,
            "layer_types has 2 entries for 6 layers",
        ),
        ({"model_type": "llama", **SMALL, "num_key_value_heads": 3}, InvalidArgumentError, "evenly"),
        ({"model_type": "gemma3", "text_config": 5}, InvalidArgumentError, "text_config is '5'"),
    ],
)
def test_what_is_not_known_is_one_sentence(config, error, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        shape_of(config, "m")
    assert "\n" not in str(caught.value)


def test_a_directory_a_file_or_a_name(tmp_path) -> None:
    (tmp_path / "some-model").mkdir()
    tiny.config("qwen3").save_pretrained(tmp_path / "some-model")
    found = load_shape(tmp_path / "some-model")
    assert found == load_shape(tmp_path / "some-model" / "config.json")
    assert (found.name, found.num_layers) == ("some-model", 2)
    for wrong in ("no-such", tmp_path):
        with pytest.raises(InvalidArgumentError, match=r"--model .* come with kvreclaim: .*Qwen/Qwen3-32B"):
            load_shape(wrong)
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(InvalidArgumentError, match="cannot be read as JSON"):
        load_shape(tmp_path / "x.json")


def test_a_config_without_a_dtype_says_so() -> None:
    shape = shape_of({"model_type": "llama", **SMALL}, "m")
    assert (shape.dtype, shape.notes) == ("bf16", ("the config says no dtype; bfloat16 is assumed",))
    odd = shape_of({"model_type": "llama", **SMALL, "torch_dtype": "float8_e4m3fn"}, "m")
    with pytest.raises(InvalidArgumentError, match="says float8_e4m3fn for its dtype"):
        weight_format("auto", odd)


def test_the_families_that_are_served_are_known() -> None:
    served = {tiny.config(family).model_type for family in tiny.FAMILIES}
    assert served <= {*FAMILIES, *COMPOSITE}
