"""Fields of a config that a GGUF file holds and transformers does not read from there."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvreclaim.model.gguf_index import GgufIndex
from kvreclaim.model.gguf_rotation import rope_scaling

LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models that scale queries by hidden size / heads, not by head dim. No field says so, and
llama.cpp goes by the layers, too."""
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors with which LongRoPE divides frequencies."""


def gguf_fields(index: GgufIndex, config: Any) -> dict[str, Any]:
    """Fields that replace those of the config that transformers makes of the file.

    Raises: KeyError for what the architecture needs and the file lacks.
    """
    architecture = str(index.fields["general.architecture"])
    said = {key.removeprefix(f"{architecture}."): value for key, value in index.fields.items()}
    if architecture == "gemma2":
        return _gemma(said, config)
    if architecture == "gemma3":
        return {**_gemma(said, config), "rope_parameters": _two_rotations(index, config)}
    if architecture == "phi3":
        return _phi3(said, config, index)
    fields = scaled_rotation(index, config)
    if architecture == "qwen3" and "attention.key_length" in said:
        fields["head_dim"] = said["attention.key_length"]
    return fields


def scaled_rotation(index: GgufIndex, config: Any) -> dict[str, Any]:
    """The config's rotation with the scaling that the file names, where it names one and all layers share it.

    Raises: UnsupportedModelError.
    """
    scaling, own = rope_scaling(index.fields), getattr(config, "rope_parameters", None) or {}
    is_plain = own.get("rope_type", "default") == "default" and not any(
        isinstance(x, dict) for x in own.values()
    )
    return {"rope_parameters": {**own, **scaling}} if scaling and is_plain else {}


def _gemma(said: dict[str, Any], config: Any) -> dict[str, Any]:
    is_27b = config.num_hidden_layers == LAYERS_OF_27B[said["general.architecture"]]
    scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {"query_pre_attn_scalar": scalar, **{cap: said[cap] for cap in caps if cap in said}}


def _two_rotations(index: GgufIndex, config: Any) -> dict[str, Any]:
    """Rotations of layers with a window, and of the others, which alone are scaled."""
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    full = {**full, **rope_scaling(index.fields)}
    base = index.fields.get("gemma3.rope.freq_base_swa", sliding["rope_theta"])
    return {"full_attention": full, "sliding_attention": {**sliding, "rope_theta": base}}


def _phi3(said: dict[str, Any], config: Any, index: GgufIndex) -> dict[str, Any]:
    head_dim = config.hidden_size // config.num_attention_heads
    partial = said.get("rope.dimension_count", head_dim) / head_dim
    rotation = {**config.rope_parameters, "partial_rotary_factor": partial}
    fields = {
        "sliding_window": said.get("attention.sliding_window") or None,
        "pad_token_id": said.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": rotation,
    }
    if SHORT not in index.tensors:
        return fields
    factors = (index.rows(index.tensors[name]) for name in (SHORT, LONG))
    short, long = (each.view(np.float32).ravel().tolist() for each in factors)
    original = said["rope.scaling.original_context_length"]
    rotation |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    rotation |= {"original_max_position_embeddings": original}
    if "rope.scaling.attn_factor" in said:
        rotation["attention_factor"] = said["rope.scaling.attn_factor"]
    return {**fields, "original_max_position_embeddings": original}
