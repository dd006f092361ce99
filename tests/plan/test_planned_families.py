"""Every causal LM of transformers is counted as transformers builds it, or refused for what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.plan.configs import shape_of
from kvreclaim.plan.families import COMPOSITE, FAMILIES, REFUSED

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 272,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "attention_chunk_size": 64,
    "moe_intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 48,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
OWN: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
    **{kind: {"rotary_dim": 8} for kind in ("codegen", "gptj")},
    "ministral3": {"max_position_embeddings": 262144},  # what its default rotation is for
    "helium": {"head_dim": 16},
    "bamba": {"attn_layer_indices": [1, 4]},
    "falcon_h1": {"mamba_d_ssm": 96},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [2, 4], "block_multiple_of": 40},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-MEM",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_latent_size": 24,
        "moe_shared_expert_intermediate_size": 48,
    },
    "qwen3_next": {"mlp_only_layers": [1]},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen2_moe": {"mlp_only_layers": [1]},
}
FLAGS = (
    *("attention_bias", "mlp_bias", "attention_out_bias", "use_bias", "qkv_bias", "bias", "use_qkv_bias"),
    *("qk_layernorm", "use_qk_norm", "enable_bias", "lm_head_bias", "multi_query", "conv_bias"),
    *("mamba_conv_bias", "mamba_proj_bias", "projectors_bias", "mamba_rms_norm", "tie_word_embeddings"),
    *("use_sliding_window",),
)


def fields(kind: str, *, flipped: bool = False) -> dict[str, Any]:
    """Make a small config. flipped: every flag of FLAGS that the class has is other than its default."""
    made = CONFIG_MAPPING[kind]
    defaults = json.loads(made().to_json_string(use_diff=False))
    own = {made.attribute_map.get(name, name): value for name, value in SMALL.items()}
    values = {name: value for name, value in own.items() if name in defaults}
    flags = {name: not defaults[name] for name in FLAGS if flipped and defaults.get(name) is not None}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {**values, **ends, **flags, **OWN.get(kind, {})}


def small(kind: str, *, flipped: bool = False) -> PreTrainedConfig:
    return CONFIG_MAPPING[kind](**fields(kind, flipped=flipped))


def written(config: PreTrainedConfig) -> dict[str, Any]:
    return dict(json.loads(config.to_json_string(use_diff=False)))


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_are_those_that_transformers_builds(kind: str, flipped: bool) -> None:
    config = small(kind, flipped=flipped)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for given in (written(config), json.loads(config.to_json_string())):
        shape = shape_of(given, kind)
        assert shape.num_params == model.num_parameters()
        assert shape.tied == config.tie_word_embeddings


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if not family.latent])
def test_keys_and_values_are_those_that_transformers_caches(kind: str) -> None:
    """The layers that store any, their heads and dims, and which of them slide."""
    config = small(kind)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        cached = model(torch.arange(3, 16)[None], use_cache=True).past_key_values
    stored = [layer for layer in cached.layers if getattr(layer, "keys", None) is not None]
    given = written(config)
    shape = shape_of(given, kind)
    if "layer_types" not in OWN.get(kind, {}):
        assert shape_of({key: given[key] for key in given if key != "layer_types"}, kind) == shape
    mine = [layer for layer in shape.layers if layer.attends]
    assert [(x.num_kv_heads, x.key_dims, x.v_head_dim) for x in mine] == [
        (x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x in stored
    ]
    assert [x.window for x in mine] == [getattr(x, "sliding_window", None) for x in stored]


@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_others_are_refused_for_what_they_are(kind: str) -> None:
    if CONFIG_MAPPING[kind].model_type in {*FAMILIES, *COMPOSITE}:
        return
    with pytest.raises(UnsupportedModelError, match=f"model_type '{kind}'") as caught:
        shape_of({"model_type": kind}, "m")
    reason = str(caught.value)
    is_known = kind in REFUSED
    assert (is_known and CONFIG_MAPPING[kind]().is_encoder_decoder) == ("an encoder-decoder" in reason)
    assert is_known == ("are not planned" in reason) != ("layers are not known here" in reason)


def test_recurrent_models_and_encoders_are_what_their_refusal_says() -> None:
    """By what they are built of: no module that attends, and attention to later tokens."""
    for kind, reason in REFUSED.items():
        assert kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if "recurrent" in reason:
            assert not hasattr(CONFIG_MAPPING[kind](), "num_key_value_heads")
        elif "an encoder," in reason:
            assert not getattr(CONFIG_MAPPING[kind](), "is_decoder", False)
