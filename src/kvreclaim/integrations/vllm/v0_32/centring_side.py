"""Attention layers of vLLM 0.32 with centred and scaled keys, and the weights that centres come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention

from kvreclaim.integrations.vllm.worker.centred_layer import CentredKeys, centre
from kvreclaim.model.key_transforms import KeyWeights
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.key_transform import KeyTransform


class CentredAttention(CentredKeys, Attention):
    """vLLM's Attention with centred and scaled keys."""


def centre_layer(layer: Attention, own: KeyTransform, dtype: torch.dtype) -> None:
    """Have a layer store its keys so. dtype: that the model computes in"""
    centre(layer, CentredAttention, own, torch.empty(0, dtype=dtype, device=layer._k_scale.device))


def weights_of(model: nn.Module, layers: Sequence[Any], facts: Sequence[LayerFacts]) -> list[KeyWeights]:
    """Weights of the modules around the layers, in the shard of this rank."""
    around = {id(child): module for module in model.modules() for child in module.children()}
    return [_weights(around.get(id(layer)), own) for layer, own in zip(layers, facts, strict=True)]


def _weights(module: Any, facts: LayerFacts) -> KeyWeights:
    joined = getattr(getattr(module, "qkv_proj", None), "bias", None)
    sizes = [n * facts.head_dim for n in (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads)]
    k_bias = q_bias = None
    if joined is not None and joined.numel() == sum(sizes):
        q_bias, k_bias, _ = joined.split(sizes)
    return KeyWeights(getattr(module, "k_norm", None), getattr(module, "q_norm", None), k_bias, q_bias)
