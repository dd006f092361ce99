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
Windows = Literal[
    "none", "all", "types", "from_layer", "from_layer_always", "all_if_used", "types_if_used", "chunks"
]
Mixer = Literal["", "delta", "conv", "mamba", "mamba2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Parts of a layer.

    qkv_bias, o_bias, mlp_bias: biases
    qk_norm:  of queries and keys: one for all heads ("head", "head_bias" with a bias), one over all heads
              ("full"); qk_norm_if: whether there are any
    norms:    vectors of hidden_size per layer; final: behind the last layer (a norm with a bias is two)
    ungated:  the MLP has two matrices, not three
    head_bias: of the output head; positions: rows of a table of positions beyond max_position_embeddings;
              None: there is no such table
    one_kv:   all heads share one key and value
    table_norms: vectors of hidden_size behind the embedding; trained_positions: where no key limits them
    scalars:  numbers per MLP; inner_norm: a vector of the MLP's size; head_vectors: of head_dim, per layer
    first_dense: layers without experts, where no key says how many
    windows:  which layers have a sliding_window: all; by layer_types; from max_window_layers on;
              "used", and from_layer: where use_sliding_window says so ("always": or not); chunks:
              chunked_attention by layer_types, or in layers with rotation
    pattern:  every n-th layer is full where layer_types is not given, -n: from the first one on; or the key
              that says n, and n where no file says it; 0: none
    sinks:    one per head
    experts:  whether there are routed ones, whose number stands under one of EXPERTS
    shared:   experts that every token visits, or the key that says how many
    dense:    key of what other layers have instead, if it is not intermediate_size
    router_bias: of the router; expert_bias: of each expert
    latent:   MLA
    gated:    queries bring a gate of their width; gate_bias: with their bias
    beside:   key of an MLP's size that every token visits beside the routed experts, and alone where dense is
              ""; beside_gate: whether it has a gate
    mixer:    of the recurrent layers; "": there are none
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


_ALL_BIASED: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_USE_BIAS: dict[str, Any] = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), "use_bias")
_CLASSIC: dict[str, Any] = {
    **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "ungated"), True),
    "norms": 4,
    "final": 2,
}
"""Biases everywhere, LayerNorm, an MLP of two matrices: GPT-2 and its like."""
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
        # Decoders with norms, biases or MLPs of their own.
        "afmoe": ModelFamily(
            **_ALL_BIASED,
            qk_norm="head",
            gated=True,
            gate_bias=False,
            norms=4,
            windows="types",
            pattern=("global_attn_every_n_layers", 4),
            experts=True,
            shared="num_shared_experts",
            router_bias=True,
            first_dense=2,
        ),
        "apertus": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", qk_norm="head", ungated=True, scalars=2),
        "apertus1p5_text": ModelFamily(
            **_ALL_BIASED, mlp_bias="mlp_bias", qk_norm="head", ungated=True, scalars=2
        ),
        "arcee": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", ungated=True),
        "aria_text": ModelFamily(
            **_ALL_BIASED, mlp_bias="mlp_bias", experts=True, shared="moe_num_shared_experts"
        ),
        "biogpt": ModelFamily(**_CLASSIC, positions=2),
        "bitnet": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", norms=3, inner_norm=True),
        "bloom": ModelFamily(**_CLASSIC, table_norms=2, trained_positions=2048),
        "codegen": ModelFamily(
            mlp_bias=True, norms=2, final=2, ungated=True, head_bias=True, dense="n_inner"
        ),
        "cohere": ModelFamily(**_ALL_BIASED, norms=1, qk_norm="full", qk_norm_if="use_qk_norm"),
        "cohere2": ModelFamily(
            **_ALL_BIASED, norms=1, windows="types", pattern=("sliding_window_pattern", 4)
        ),
        "diffllama": ModelFamily(**_ALL_BIASED, head_vectors=4),
        "dots1": ModelFamily(
            **_ALL_BIASED,
            qk_norm="head",
            windows="from_layer_always",
            experts=True,
            shared="n_shared_experts",
        ),
        "ernie4_5": ModelFamily(**_USE_BIAS),
        "ernie4_5_moe": ModelFamily(
            **_USE_BIAS,
            experts=True,
            shared="moe_num_shared_experts",
            router_bias=True,
            first_dense=1,
            head_bias="use_bias",
        ),
        "exaone": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias"),
        "exaone4": ModelFamily(qk_norm="head", windows="types", pattern=("sliding_window_pattern", 4)),
        "exaone_moe": ModelFamily(
            qk_norm="head",
            windows="types",
            pattern=("sliding_window_pattern", 4),
            experts=True,
            shared="num_shared_experts",
            first_dense=1,
        ),
        "flex_olmo": ModelFamily(**_ALL_BIASED, qk_norm="full", experts=True),
        "glm": ModelFamily(qkv_bias="attention_bias"),
        "glm4_moe": ModelFamily(
            qkv_bias="attention_bias",
            qk_norm="head",
            qk_norm_if="use_qk_norm",
            experts=True,
            shared="n_shared_experts",
        ),
        "glm4_moe_lite": ModelFamily(
            o_bias="attention_bias", latent=True, experts=True, shared="n_shared_experts", first_dense=1
        ),
        "gpt2": ModelFamily(**_CLASSIC, positions=0, dense="n_inner"),
        "gpt_bigcode": ModelFamily(**_CLASSIC, positions=0, dense="n_inner", one_kv="multi_query"),
        "gpt_neox": ModelFamily(**{**_CLASSIC, "qkv_bias": "attention_bias", "o_bias": "attention_bias"}),
        "gptj": ModelFamily(mlp_bias=True, norms=2, final=2, ungated=True, head_bias=True, dense="n_inner"),
        "granite_swa": ModelFamily(
            **_ALL_BIASED, mlp_bias="mlp_bias", windows="types", pattern=-4, sinks=True
        ),
        "granitemoe": ModelFamily(**_ALL_BIASED, experts=True),
        "granitemoe_swa": ModelFamily(
            **_ALL_BIASED,
            windows="types",
            pattern=-4,
            sinks=True,
            experts=True,
            dense="",
            beside="shared_intermediate_size",
        ),
        "granitemoeshared": ModelFamily(
            **_ALL_BIASED, experts=True, dense="", beside="shared_intermediate_size"
        ),
        "helium": ModelFamily(qkv_bias="attention_bias", mlp_bias="mlp_bias"),
        "hunyuan_v1_dense": ModelFamily(**_ALL_BIASED, qk_norm="head"),
        "hunyuan_v1_moe": ModelFamily(**_ALL_BIASED, qk_norm="head", experts=True, shared=1),
        "hy_v3": ModelFamily(
            **_ALL_BIASED,
            mlp_bias="mlp_bias",
            qk_norm="head",
            experts=True,
            shared="num_shared_experts",
            first_dense=1,
        ),
        "hyperclovax": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", norms=4),
        "internlm3": ModelFamily(qkv_bias="qkv_bias", o_bias="bias", mlp_bias="bias"),
        "iquestcoder": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias"),
        "jais2": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", norms=4, final=2, ungated=True),
        "mellum": ModelFamily(**_ALL_BIASED, qk_norm="head", windows="types", pattern=1, experts=True),
        "minicpm3": ModelFamily(o_bias="attention_bias", mlp_bias="mlp_bias", latent=True),
        "minimax_m2": ModelFamily(qk_norm="full", experts=True),
        "ministral3": ModelFamily(windows="all"),
        "mpt": ModelFamily(ungated=True),
        "nanochat": ModelFamily(**_ALL_BIASED, norms=0, final=0, ungated=True),
        "nemotron": ModelFamily(**_ALL_BIASED, mlp_bias="mlp_bias", norms=4, final=2, ungated=True),
        "olmo": ModelFamily(**_ALL_BIASED, norms=0, final=0),
        "olmoe": ModelFamily(**_ALL_BIASED, qk_norm="full", experts=True),
        "opt": ModelFamily(
            **{**_CLASSIC, "qkv_bias": "enable_bias", "o_bias": "enable_bias", "mlp_bias": "enable_bias"},
            positions=2,
            dense="ffn_dim",
        ),
        "persimmon": ModelFamily(**_CLASSIC, qk_norm="head_bias", qk_norm_if="qk_layernorm"),
        "phi": ModelFamily(
            **{**_CLASSIC, "norms": 2}, qk_norm="head_bias", qk_norm_if="qk_layernorm", head_bias=True
        ),
        "phimoe": ModelFamily(
            **_ALL_BIASED, norms=4, final=2, windows="all", experts=True, head_bias="lm_head_bias"
        ),
        "qwen2_moe": ModelFamily(
            qkv_bias="qkv_bias",
            windows="from_layer",
            experts=True,
            beside="shared_expert_intermediate_size",
            beside_gate=True,
        ),
        "qwen3_5_moe_text": ModelFamily(
            **_QWEN_DELTA, experts=True, beside="shared_expert_intermediate_size", beside_gate=True
        ),
        "sarvam_mla": ModelFamily(
            o_bias="attention_bias", latent=True, experts=True, shared="n_shared_experts"
        ),
        "sarvam_moe": ModelFamily(
            qkv_bias="attention_bias",
            qk_norm="head",
            qk_norm_if="use_qk_norm",
            experts=True,
            shared="n_shared_experts",
        ),
        "solar_open": ModelFamily(qkv_bias="attention_bias", experts=True, shared="n_shared_experts"),
        "stablelm": ModelFamily(
            qkv_bias="use_qkv_bias", norms=4, final=2, qk_norm="full", qk_norm_if="qk_layernorm"
        ),
        "starcoder2": ModelFamily(
            **{**_CLASSIC, "qkv_bias": "use_bias", "o_bias": "use_bias", "mlp_bias": "use_bias"},
            windows="all",
        ),
        "vaultgemma": ModelFamily(**_ALL_BIASED, windows="types", pattern=2),
        "xglm": ModelFamily(**_CLASSIC, dense="ffn_dim"),
        "youtu": ModelFamily(o_bias="attention_bias", mlp_bias="mlp_bias", latent=True),
    }
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
"""Among these: names of fields, and what the class calls them."""
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
"""Keys that change what is cached or weighed; a family that does not read one refuses it."""
