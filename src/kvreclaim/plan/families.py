"""Which parts the layers of a model_type have, as transformers builds them; a test counts theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Switch = bool | str
"""A fact of the family, or the key of the config that says it."""
Windows = Literal["none", "all", "types", "from_layer", "all_if_used", "types_if_used", "chunks"]
Mixer = Literal["", "delta", "conv", "mamba", "mamba2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Parts of a layer.

    qkv_bias, o_bias, mlp_bias: biases
    qk_norm:  of queries and keys: one per head ("head"), or over all heads ("full")
    norms:    vectors of hidden_size per layer
    windows:  which layers have a sliding_window: all; by layer_types; from max_window_layers on;
              "used", and from_layer: where use_sliding_window says so; chunks: chunked_attention by
              layer_types, or in layers with rotation
    pattern:  every n-th layer is full where layer_types is not given; or the key that says n, and n where no
              file says it; 0: none
    sinks:    one per head
    experts:  whether there are routed ones, whose number stands under one of EXPERTS
    shared:   experts that every token visits, or the key that says how many
    dense:    key of what other layers have instead, if it is not intermediate_size
    router_bias: of the router; expert_bias: of each expert
    latent:   MLA
    gated:    queries bring a gate of their width
    beside:   key of an MLP's size that every token visits beside the routed experts, and alone where dense is
              ""; beside_gate: whether it has a gate
    mixer:    of the recurrent layers; "": there are none
    """

    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Literal["", "head", "full"] = ""
    norms: int = 2
    windows: Windows = "none"
    pattern: int | tuple[str, int] = 0
    sinks: bool = False
    experts: bool = False
    shared: int | str = 0
    dense: str = "intermediate_size"
    router_bias: bool = False
    expert_bias: bool = False
    latent: bool = False
    gated: bool = False
    beside: str = ""
    beside_gate: bool = False
    mixer: Mixer = ""


_ALL_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_QWEN_DELTA: dict[str, Any] = {**_ALL_BIASED, "qk_norm": "head", "gated": True, "mixer": "delta"}

FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "llama": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias"),
        "mistral": ModelFamily(windows="all"),
        "ministral": ModelFamily(windows="types"),
        "mixtral": ModelFamily(windows="all", experts=True),
        "qwen2": ModelFamily(qkv_bias=True, windows="from_layer"),
        "qwen3": ModelFamily(**_ALL_BIASED, qk_norm="head", windows="from_layer"),
        "qwen3_moe": ModelFamily(**_ALL_BIASED, qk_norm="head", windows="all_if_used", experts=True),
        "gemma": ModelFamily(**_ALL_BIASED),
        "gemma2": ModelFamily(**_ALL_BIASED, norms=4, windows="types", pattern=2),
        "gemma3_text": ModelFamily(
            **_ALL_BIASED, qk_norm="head", norms=4, windows="types", pattern=("sliding_window_pattern", 6)
        ),
        "phi3": ModelFamily(windows="all"),
        "gpt_oss": ModelFamily(
            **_ALL_BIASED,
            windows="types",
            pattern=2,
            sinks=True,
            experts=True,
            router_bias=True,
            expert_bias=True,
        ),
        "deepseek_v2": ModelFamily(
            o_bias="attention_bias", mlp_bias="mlp_bias", latent=True, experts=True, shared="n_shared_experts"
        ),
        "deepseek_v3": ModelFamily(
            o_bias="attention_bias", latent=True, experts=True, shared="n_shared_experts"
        ),
        "glm4": ModelFamily(qkv_bias="attention_bias", norms=4),
        "olmo2": ModelFamily(**_ALL_BIASED, qk_norm="full"),
        "olmo3": ModelFamily(**_ALL_BIASED, qk_norm="full", windows="types", pattern=4),
        "smollm3": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", windows="types_if_used"),
        "llama4_text": ModelFamily(
            **_ALL_BIASED, windows="chunks", experts=True, dense="intermediate_size_mlp", shared=1
        ),
        "granite": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias"),
        "seed_oss": ModelFamily(qkv_bias="attention_bias", o_bias="attention_out_bias", mlp_bias="mlp_bias"),
        "qwen3_next": ModelFamily(
            **_QWEN_DELTA, experts=True, beside="shared_expert_intermediate_size", beside_gate=True
        ),
        "qwen3_5_text": ModelFamily(**_QWEN_DELTA),
        "lfm2": ModelFamily(qk_norm="head", mixer="conv"),
        "granitemoehybrid": ModelFamily(
            **_ALL_BIASED,
            experts=True,
            dense="",
            beside="shared_intermediate_size",
            mixer="mamba2",
        ),
        "falcon_h1": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", mixer="mamba2"),
        "bamba": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", mixer="mamba2"),
        "jamba": ModelFamily(experts=True, mixer="mamba"),
        "nemotron_h": ModelFamily(norms=1, experts=True, mlp_bias="mlp_bias", mixer="mamba2"),
    }
)

ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "lfm2": {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"},
        "granitemoehybrid": {"layer_types": "layers_block_type"},
        "nemotron_h": {
            "layer_types": "layers_block_type",
            "n_groups": "mamba_n_groups",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
        },
    }
)
"""Other keys of a field, by model_type; they come first."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A model with a vision tower. key: of its language model's config; inner: that one's type if not said;
    ties: whether its own tie_word_embeddings counts, and not the language model's."""

    key: str
    inner: str
    ties: bool


COMPOSITE: Mapping[str, Composite] = MappingProxyType(
    {
        "gemma3": Composite("text_config", "gemma3_text", ties=True),
        "llama4": Composite("text_config", "llama4_text", ties=False),
        "mistral3": Composite("text_config", "mistral", ties=True),
        "qwen3_5": Composite("text_config", "qwen3_5_text", ties=True),
    }
)

DEFAULTS_FILE = Path(__file__).parent / "data" / "defaults.json"
DEFAULTS: Mapping[str, Mapping[str, Any]] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))
"""Defaults of transformers' config classes by model_type, written by scripts/plan_defaults.py."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TELLING = (
    *EXPERTS,
    "kv_lora_rank",
    "sliding_window",
    "layer_types",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "use_bidirectional_attention",
    "index_topk",
    "cross_attention_layers",
    "attn_layer_period",
    "mamba_d_state",
    "ssm_state_size",
    "conv_L_cache",
    "linear_num_key_heads",
)
"""Keys that change what is cached or weighed; a family that does not read one refuses it."""
