"""The header of a GGUF file (llama.cpp's format) as a config, and the sizes of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvreclaim.checks import require
from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.gguf_index import EMBEDDING, GgufIndex, GgufTensor, quoted, rope_scaling
from kvreclaim.model.gguf_index import read_index as read_index
from kvreclaim.plan.shapes import ModelShape, StoredWeights

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "qwen3moe": "qwen3_moe",
        "gemma": "gemma",
        "gemma2": "gemma2",
        "gemma3": "gemma3_text",
        "phi3": "phi3",
        "gpt-oss": "gpt_oss",
        "glm4": "glm4",
        "olmo2": "olmo2",
        "smollm3": "smollm3",
        "granite": "granite",
        "seed_oss": "seed_oss",
    }
)
"""llama.cpp's names, and transformers' model_type; a llama with experts is a mixtral."""
NEEDED = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
    }
)
OPTIONAL = MappingProxyType(
    {
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
)
"""Without them a model has as many KV heads as heads, which share hidden_size, no windows and no experts."""
HEAD = "output.weight"


def config_of(index: GgufIndex, file: Path) -> dict[str, Any]:
    """The config as transformers would write it. Raises: InvalidArgumentError, UnsupportedModelError."""
    fields = index.fields
    kind = str(fields.get("general.architecture"))
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.name} is of the architecture {quoted(kind)}, which is not read from GGUF here; known are "
            f"{', '.join(ARCHITECTURES)}."
        )
    lacking = [key for key in NEEDED if f"{kind}.{key}" not in fields]
    require(
        not lacking and EMBEDDING in index.tensors,
        f"{file.name} does not say {', '.join(lacking) or EMBEDDING}, or says it for each layer; name the "
        "config.json of the model it was made of.",
        "model",
    )
    config = {name: fields.get(f"{kind}.{key}") for key, name in (NEEDED | OPTIONAL).items()}
    model_type = "mixtral" if kind == "llama" and config["num_experts"] else ARCHITECTURES[kind]
    names = index.tensors.keys()
    return config | {
        "model_type": model_type,
        "dtype": "bfloat16",
        "rope_parameters": rope_scaling(fields),
        "vocab_size": index.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "attention_out_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
    }


def weighed(shape: ModelShape, index: GgufIndex, file: Path) -> ModelShape:
    """Return the shape with the sizes of the file's tensors. Raises: UnsupportedModelError if they are not
    those of the shape."""
    if index.num_weights != shape.num_params:
        raise UnsupportedModelError(
            f"{file.name} holds {index.num_weights:,} weights, where its header describes a "
            f"{shape.model_type} of {shape.num_params:,}; a plan would be wrong: name the config.json of the "
            "model it was made of."
        )
    return replace(shape, stored=_stored(index.weights))


def _stored(tensors: Iterable[GgufTensor]) -> StoredWeights:
    kinds, embedding, routed, total = Counter[str](), 0, 0, 0
    tied = True
    for tensor in tensors:
        kinds[tensor.kind] += 1
        total += tensor.num_bytes
        routed += tensor.num_bytes * ("_exps." in tensor.name)
        embedding += tensor.num_bytes * (tensor.name == EMBEDDING)
        tied = tied and tensor.name != HEAD
    return StoredWeights(tuple(kinds.most_common()), total, routed, 0 if tied else embedding)
