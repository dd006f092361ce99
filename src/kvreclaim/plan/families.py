"""Which parts the layers of a model_type have, as transformers builds them; a test counts theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Switch = bool | str
"""A fact of the family, or the key of the config that says it."""
Windows = Literal["none", "all", "types", "from_layer", "all_if_used", "types_if_used", "chunks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Parts of a layer.

    qkv_bias, o_bias, mlp_bias: biases
    qk_norm:  of queries and keys: one per head ("head"), or over all heads ("full")
    norms:    vectors of hidden_size per layer
    windows:  which layers have a sliding_window: all; by layer_types; from max_window_layers on;
              "used", and from_layer: where use_sliding_window says so; chunks: chunked_attention by
              layer_types, or in layers with rotation
    pattern:  every n-th layer is full where layer_types is not given; 0: none
    sinks:    one per head
    experts:  whether there are routed ones, whose number stands under one of EXPERTS
    dense:    key of what other layers have instead, if it is not intermediate_size
    router_bias: of the router; expert_bias: of each expert
    latent:   MLA
    defaults: of keys that published files leave out, as the class of transformers has them
    """

    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Literal["", "head", "full"] = ""
    norms: int = 2
    windows: Windows = "none"
    pattern: int = 0
    sinks: bool = False
    experts: bool = False
    dense: str = "intermediate_size"
    router_bias: bool = False
    expert_bias: bool = False
    latent: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_BIASED = {"attention_bias": False}
_QWEN3: dict[str, Any] = {**_BIASED, "use_sliding_window": False, "head_dim": 128}
_GEMMA: dict[str, Any] = {**_BIASED, "head_dim": 256, "tie_word_embeddings": True}
_DEEPSEEK: dict[str, Any] = {**_BIASED, "q_lora_rank": None}
_GEMMA3 = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    norms=4,
    windows="types",
    pattern=6,
    defaults={**_GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096},
)
_ALL_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(**_ALL_BIASED, mlp_bias="mlp_bias", defaults={**_BIASED, "mlp_bias": False}),
        "mistral": Family(windows="all", defaults={"sliding_window": 4096}),
        "ministral": Family(windows="types", defaults={"sliding_window": 4096}),
        "mixtral": Family(windows="all", experts=True),
        "qwen2": Family(qkv_bias=True, windows="from_layer", defaults={"use_sliding_window": False}),
        "qwen3": Family(**_ALL_BIASED, qk_norm="head", windows="from_layer", defaults=_QWEN3),
        "qwen3_moe": Family(
            **_ALL_BIASED,
            qk_norm="head",
            windows="all_if_used",
            experts=True,
            defaults={
                **_BIASED,
                "use_sliding_window": False,
                "mlp_only_layers": [],
                "decoder_sparse_step": 1,
            },
        ),
        "gemma": Family(**_ALL_BIASED, defaults=_GEMMA),
        "gemma2": Family(
            **_ALL_BIASED, norms=4, windows="types", pattern=2, defaults={**_GEMMA, "sliding_window": 4096}
        ),
        "gemma3_text": _GEMMA3,
        "phi3": Family(windows="all"),
        "gpt_oss": Family(
            **_ALL_BIASED,
            windows="types",
            pattern=2,
            sinks=True,
            experts=True,
            router_bias=True,
            expert_bias=True,
            defaults={"attention_bias": True, "sliding_window": 128, "head_dim": 64},
        ),
        "deepseek_v2": Family(
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            latent=True,
            experts=True,
            defaults={**_DEEPSEEK, "mlp_bias": False},
        ),
        "deepseek_v3": Family(o_bias="attention_bias", latent=True, experts=True, defaults=_DEEPSEEK),
        "glm4": Family(
            qkv_bias="attention_bias", norms=4, defaults={"attention_bias": True, "head_dim": 128}
        ),
        "olmo2": Family(**_ALL_BIASED, qk_norm="full", defaults=_BIASED),
        "olmo3": Family(
            **_ALL_BIASED,
            qk_norm="full",
            windows="types",
            pattern=4,
            defaults={**_BIASED, "sliding_window": 4096},
        ),
        "smollm3": Family(
            **_ALL_BIASED,
            mlp_bias="mlp_bias",
            windows="types_if_used",
            defaults={
                **_BIASED,
                "mlp_bias": False,
                "use_sliding_window": False,
                "tie_word_embeddings": True,
            },
        ),
        "llama4_text": Family(
            **_ALL_BIASED,
            windows="chunks",
            experts=True,
            dense="intermediate_size_mlp",
            defaults={
                **_BIASED,
                "attention_chunk_size": 8192,
                "head_dim": 128,
                "interleave_moe_layer_step": 1,
                "n_shared_experts": 1,
                "num_experts_per_tok": 1,
                "num_local_experts": 16,
            },
        ),
        "granite": Family(**_ALL_BIASED, mlp_bias="mlp_bias", defaults={**_BIASED, "mlp_bias": False}),
        "seed_oss": Family(
            qkv_bias="attention_bias",
            o_bias="attention_out_bias",
            mlp_bias="mlp_bias",
            defaults={
                "attention_bias": True,
                "attention_out_bias": False,
                "mlp_bias": False,
                "head_dim": 128,
            },
        ),
    }
)

COMPOSITE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "gemma3": ("text_config", "gemma3_text"),
        "llama4": ("text_config", "llama4_text"),
        "mistral3": ("text_config", "mistral"),
    }
)
"""Of a model with a vision tower: where its language model's config is, and that one's type if not said."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TELLING = (
    *EXPERTS,
    "kv_lora_rank",
    "sliding_window",
    "layer_types",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "index_topk",
    "cross_attention_layers",
    "attn_layer_period",
    "mamba_d_state",
    "linear_num_key_heads",
)
"""Keys that change what is cached or weighed; a family that does not read one refuses it."""
