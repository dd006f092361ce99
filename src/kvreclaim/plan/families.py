"""The parts of the layers of each model_type, as transformers builds them; a test compares the counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Switch = bool | str
"""A fact of the family, or the key of the config that holds it."""
Windows = Literal[
    "none", "all", "types", "from_layer", "from_layer_always", "all_if_used", "types_if_used", "chunks"
]
Mixer = Literal["", "delta", "conv", "mamba", "mamba2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Parts of a layer.

    qkv_bias, o_bias, mlp_bias: biases
    qk_norm:  norm of queries and keys: "head" with the weights of one head, "head_bias" with biases too,
              "full" with weights for all heads; qk_norm_if: whether there is one
    norms:    vectors of hidden_size per layer; final: after the last layer (a norm with a bias has two)
    ungated:  the MLP has two matrices instead of three
    head_bias: bias of the output head; positions: rows of the position table beyond max_position_embeddings,
              None without such a table
    one_kv:   all heads share one key and value
    table_norms: vectors of hidden_size after the embedding; trained_positions: limit if no key holds one
    scalars:  numbers per MLP; inner_norm: a vector of the MLP's size; head_vectors: vectors of head_dim
    first_dense: layers without experts if no key holds their number
    windows:  layers with a sliding_window: all; by layer_types; from max_window_layers on. "used" and
              from_layer: only if use_sliding_window is set ("always": or not). chunks: chunked_attention by
              layer_types, or in layers with rotation
    pattern:  without layer_types every n-th layer is full (-n: from the first one on); or the key of n and
              its default; 0: none
    sinks:    one per head
    experts:  the layers have routed experts; one of EXPERTS is the key of their number
    shared:   number of experts that every token visits, or its key
    dense:    key of the MLP size of layers without experts
    router_bias: bias of the router; expert_bias: biases of each expert
    latent:   MLA
    gated:    queries have a gate of their width; gate_bias: with their bias
    beside:   key of the size of an MLP for every token next to the experts, the only MLP if dense is "";
              beside_gate: it has a gate
    mixer:    kind of the recurrent layers; "" without any
    """

    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Literal["", "head", "full", "head_bias"] = ""
    qk_norm_if: Switch = True
    norms: int = 2
    final: int = 1
    ungated: bool = False
    head_bias: Switch = False
    positions: int | None = None
    trained_positions: int | None = None
    table_norms: int = 0
    scalars: int = 0
    inner_norm: bool = False
    head_vectors: int = 0
    one_kv: Switch = False
    windows: Windows = "none"
    pattern: int | tuple[str, int] = 0
    sinks: bool = False
    experts: bool = False
    shared: int | str = 0
    first_dense: int = 0
    dense: str = "intermediate_size"
    router_bias: bool = False
    expert_bias: bool = False
    latent: bool = False
    gated: bool = False
    gate_bias: bool = True
    beside: str = ""
    beside_gate: bool = False
    mixer: Mixer = ""


_BIASED = ModelFamily(qkv_bias="attention_bias", o_bias="attention_bias")
_LLAMA = replace(_BIASED, mlp_bias="mlp_bias")
_GEMMA2 = replace(_BIASED, norms=4, windows="types", pattern=2)
_OLMO2 = replace(_BIASED, qk_norm="full")
_QWEN3 = replace(_BIASED, qk_norm="head")
_QWEN_DELTA = replace(_QWEN3, gated=True, mixer="delta")
_EXAONE4 = ModelFamily(qk_norm="head", windows="types", pattern=("sliding_window_pattern", 4))
_ERNIE = ModelFamily(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias")
_GPT = ModelFamily(qkv_bias=True, o_bias=True, mlp_bias=True, ungated=True, norms=4, final=2)
_GPTJ = ModelFamily(mlp_bias=True, final=2, ungated=True, head_bias=True, dense="n_inner")
_MLA = ModelFamily(o_bias="attention_bias", mlp_bias="mlp_bias", latent=True)
_DEEPSEEK = ModelFamily(o_bias="attention_bias", latent=True, experts=True, shared="n_shared_experts")
_SOLAR = ModelFamily(qkv_bias="attention_bias", experts=True, shared="n_shared_experts")
_GLM4_MOE = replace(_SOLAR, qk_norm="head", qk_norm_if="use_qk_norm")
_GRANITE_SWA = replace(_BIASED, windows="types", pattern=-4, sinks=True)
_GRANITE_MOE = replace(_BIASED, experts=True, dense="", beside="shared_intermediate_size")
_QWEN_MOE: dict[str, Any] = {
    "experts": True,
    "beside": "shared_expert_intermediate_size",
    "beside_gate": True,
}
_BY_TYPES: Mapping[str, ModelFamily] = {
    "afmoe": replace(
        _GEMMA2,
        qk_norm="head",
        pattern=("global_attn_every_n_layers", 4),
        experts=True,
        shared="num_shared_experts",
        first_dense=2,
        router_bias=True,
        gated=True,
        gate_bias=False,
    ),
    "apertus apertus1p5_text": replace(_LLAMA, qk_norm="head", ungated=True, scalars=2),
    "arcee": replace(_LLAMA, ungated=True),
    "aria_text": replace(_LLAMA, experts=True, shared="moe_num_shared_experts"),
    "biogpt": replace(_GPT, positions=2),
    "bitnet": replace(_LLAMA, norms=3, inner_norm=True),
    "bloom": replace(_GPT, trained_positions=2048, table_norms=2),
    "codegen gptj": _GPTJ,
    "cohere": replace(_OLMO2, qk_norm_if="use_qk_norm", norms=1),
    "cohere2": replace(_GEMMA2, norms=1, pattern=("sliding_window_pattern", 4)),
    "deepseek_v2": replace(_DEEPSEEK, mlp_bias="mlp_bias"),
    "deepseek_v3 sarvam_mla": _DEEPSEEK,
    "diffllama": replace(_BIASED, head_vectors=4),
    "dots1": replace(_QWEN3, windows="from_layer_always", experts=True, shared="n_shared_experts"),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(
        _ERNIE,
        head_bias="use_bias",
        experts=True,
        shared="moe_num_shared_experts",
        first_dense=1,
        router_bias=True,
    ),
    "exaone4": _EXAONE4,
    "exaone_moe": replace(_EXAONE4, experts=True, shared="num_shared_experts", first_dense=1),
    "falcon_h1 bamba": replace(_LLAMA, mixer="mamba2"),
    "flex_olmo olmoe": replace(_OLMO2, experts=True),
    "gemma": _BIASED,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, qk_norm="head", pattern=("sliding_window_pattern", 6)),
    "glm": ModelFamily(qkv_bias="attention_bias"),
    "glm4": ModelFamily(qkv_bias="attention_bias", norms=4),
    "glm4_moe sarvam_moe": _GLM4_MOE,
    "glm4_moe_lite": replace(_DEEPSEEK, first_dense=1),
    "gpt2": replace(_GPT, positions=0, dense="n_inner"),
    "gpt_bigcode": replace(_GPT, positions=0, one_kv="multi_query", dense="n_inner"),
    "gpt_neox": replace(_LLAMA, mlp_bias=True, norms=4, final=2, ungated=True),
    "gpt_oss": replace(_GRANITE_SWA, pattern=2, experts=True, router_bias=True, expert_bias=True),
    "granite_swa": replace(_GRANITE_SWA, mlp_bias="mlp_bias"),
    "granitemoe": replace(_BIASED, experts=True),
    "granitemoe_swa": replace(_GRANITE_MOE, windows="types", pattern=-4, sinks=True),
    "granitemoehybrid": replace(_GRANITE_MOE, mixer="mamba2"),
    "granitemoeshared": _GRANITE_MOE,
    "helium": replace(_LLAMA, o_bias=False),
    "hunyuan_v1_dense": _QWEN3,
    "hunyuan_v1_moe": replace(_QWEN3, experts=True, shared=1),
    "hy_v3": replace(_LLAMA, qk_norm="head", experts=True, shared="num_shared_experts", first_dense=1),
    "hyperclovax": replace(_LLAMA, norms=4),
    "internlm3": ModelFamily(qkv_bias="qkv_bias", o_bias="bias", mlp_bias="bias"),
    "jais2 nemotron": replace(_LLAMA, norms=4, final=2, ungated=True),
    "jamba": ModelFamily(experts=True, mixer="mamba"),
    "lfm2": ModelFamily(qk_norm="head", mixer="conv"),
    "llama granite exaone iquestcoder": _LLAMA,
    "llama4_text": replace(_BIASED, windows="chunks", experts=True, shared=1, dense="intermediate_size_mlp"),
    "mellum": replace(_QWEN3, windows="types", pattern=1, experts=True),
    "minicpm3 youtu": _MLA,
    "minimax_m2": ModelFamily(qk_norm="full", experts=True),
    "ministral": ModelFamily(windows="types"),
    "mistral phi3 ministral3": ModelFamily(windows="all"),
    "mixtral": ModelFamily(windows="all", experts=True),
    "mpt": ModelFamily(ungated=True),
    "nanochat": replace(_BIASED, norms=0, final=0, ungated=True),
    "nemotron_h": ModelFamily(mlp_bias="mlp_bias", norms=1, experts=True, mixer="mamba2"),
    "olmo": replace(_BIASED, norms=0, final=0),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, windows="types", pattern=4),
    "opt": replace(
        _GPT,
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        mlp_bias="enable_bias",
        positions=2,
        dense="ffn_dim",
    ),
    "persimmon": replace(_GPT, qk_norm="head_bias", qk_norm_if="qk_layernorm"),
    "phi": replace(_GPT, qk_norm="head_bias", qk_norm_if="qk_layernorm", norms=2, head_bias=True),
    "phimoe": replace(_BIASED, norms=4, final=2, head_bias="lm_head_bias", windows="all", experts=True),
    "qwen2": ModelFamily(qkv_bias=True, windows="from_layer"),
    "qwen2_moe": ModelFamily(qkv_bias="qkv_bias", windows="from_layer", **_QWEN_MOE),
    "qwen3": replace(_QWEN3, windows="from_layer"),
    "qwen3_5_text": _QWEN_DELTA,
    "qwen3_moe": replace(_QWEN3, windows="all_if_used", experts=True),
    "qwen3_next qwen3_5_moe_text": replace(_QWEN_DELTA, **_QWEN_MOE),
    "seed_oss": replace(_LLAMA, o_bias="attention_out_bias"),
    "smollm3": replace(_LLAMA, windows="types_if_used"),
    "solar_open": _SOLAR,
    "stablelm": ModelFamily(
        qkv_bias="use_qkv_bias", qk_norm="full", qk_norm_if="qk_layernorm", norms=4, final=2
    ),
    "starcoder2": replace(_ERNIE, norms=4, final=2, ungated=True, windows="all"),
    "vaultgemma": replace(_GEMMA2, norms=2),
    "xglm": replace(_GPT, dense="ffn_dim"),
}
FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {kind: family for kinds, family in _BY_TYPES.items() for kind in kinds.split()}
)

ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "afmoe": {"first_k_dense_replace": "num_dense_layers"},
        "aria_text": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk"},
        "bloom": {"max_position_embeddings": "seq_length"},
        "ernie4_5_moe": {
            "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
        },
        "mpt": {"max_position_embeddings": "max_seq_len"},
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
"""Other keys of a field, by model_type; they take precedence."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A model with a vision tower.

    key:   of the language model's config
    inner: default model_type of that config
    ties:  the outer tie_word_embeddings counts instead of the language model's
    """

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

_REASONS = {
    "an encoder-decoder, which also keeps keys and values of its input": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus "
        "plbart prophetnet whisper"
    ),
    "an encoder, which keeps no keys and values from token to token": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
    ),
    "a recurrent model without attention, which keeps no keys and values": (
        "falcon_mamba mamba mamba2 rwkv xlstm"
    ),
}
REFUSED: Mapping[str, str] = MappingProxyType(
    {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
)
"""Why models of a type are not planned."""
DEFAULTS_FILE = Path(__file__).parent / "data" / "defaults.json"
DEFAULTS: Mapping[str, Mapping[str, Any]] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))
"""Defaults of transformers' config classes by model_type, written by scripts/docs.py."""

OTHER_NAMES = "attribute_map"
"""Key of the class's own names of fields."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TELLING = (
    *EXPERTS,
    "kv_lora_rank",
    "sliding_window",
    "layer_types",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "use_cla",
    "use_bidirectional_attention",
    "index_topk",
    "cross_attention_layers",
    "attn_layer_period",
    "mamba_d_state",
    "ssm_state_size",
    "conv_L_cache",
    "linear_num_key_heads",
)
"""Keys that change cache or weights; a family that does not read one refuses it."""
