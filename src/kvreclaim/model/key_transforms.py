"""Transforms of all layers' keys in a coded cache (ops/key_transform.py), from a calibration's statistics.

Without statistics they come from the weights: from norms over queries and keys, else from biases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.key_transform import KeyStats, KeyTransform, transform_of

SPREAD = 4.0
"""Energy of a channel besides its bias: what inputs make of it is of size one to four in every layer."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyWeights:
    """Weights of an attention layer that queries and keys have in common before rotation; None where it has
    none.

    k_norm, q_norm: norms over heads
    k_bias, q_bias: [K * D] and [H * D], of the projections
    """

    k_norm: Any
    q_norm: Any
    k_bias: Tensor | None
    q_bias: Tensor | None


def key_transforms(
    model: nn.Module, facts: ModelFacts, stats: Sequence[KeyStats] | None
) -> tuple[KeyTransform, ...] | None:
    """transforms_from the statistics of a calibration or, where there are none, the model's weights."""
    return transforms_from(facts, stats if stats is not None else weight_stats(_weights_in(model), facts))


@torch.inference_mode()
def transforms_from(facts: ModelFacts, stats: Sequence[KeyStats] | None) -> tuple[KeyTransform, ...] | None:
    """One transform for each layer, fp32, with scales of powers of two.

    stats: means and energies of each layer's keys; None: they are not known

    Returns: None without stats, for a model with latents, and where no channel differs from another.
    """
    ropes = [layer.rope for layer in facts.layers if layer.rope is not None and not layer.latent]
    if stats is None or len(ropes) < facts.num_layers:
        return None
    made = tuple(
        transform_of(own, rope, facts.max_position, is_centred=layer.softmax.ignores_constants)
        for own, rope, layer in zip(stats, ropes, facts.layers, strict=True)
    )
    return None if all(own.is_identity for own in made) else made


def transforms_digest(transforms: Sequence[KeyTransform]) -> str:
    """Identifies transforms: caches with different ones cannot exchange blocks."""
    digest = hashlib.sha256()
    for own in transforms:
        for part in own.tensors:
            digest.update(b"" if part is None else part.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def weight_stats(weights: Sequence[KeyWeights], facts: ModelFacts) -> list[KeyStats] | None:
    """Statistics by each layer's weights; None where a layer has neither norms nor biases."""
    if len(weights) != facts.num_layers:
        return None
    found = [_of_weights(own, layer) for own, layer in zip(weights, facts.layers, strict=True)]
    known = [own for own in found if own is not None]
    return known if len(known) == len(found) else None


def _weights_in(model: nn.Module) -> list[KeyWeights]:
    modules = [each for each in model.modules() if isinstance(getattr(each, "layer_idx", None), int)]
    return [
        KeyWeights(
            getattr(each, "k_norm", None),
            getattr(each, "q_norm", None),
            _bias(each.k_proj),
            _bias(each.q_proj),
        )
        for each in modules
        if hasattr(each, "q_proj") and hasattr(each, "k_proj")
    ]


def _bias(linear: Any) -> Tensor | None:
    return getattr(linear, "bias", None)


def _of_weights(own: KeyWeights, layer: LayerFacts) -> KeyStats | None:
    heads, dim = (layer.num_kv_heads, layer.num_heads), layer.head_dim
    norms, biases = (own.k_norm, own.q_norm), (own.k_bias, own.q_bias)
    if all(getattr(norm, "weight", None) is not None for norm in norms):
        key, query = (_of_norm(norm, n, dim) for norm, n in zip(norms, heads, strict=True))
        if key is None or query is None:
            return None
        return KeyStats(torch.zeros_like(key), key.square(), _by_kv_head(query.square(), layer))
    known = [bias.float().view(-1, dim) for bias in biases if bias is not None and bias.numel() % dim == 0]
    if [len(bias) for bias in known] != list(heads):
        return None
    key, query = known
    return KeyStats(key, key.square() + SPREAD, _by_kv_head(query.square() + SPREAD, layer))


def _of_norm(norm: Any, heads: int, dim: int) -> Tensor | None:
    """Apply an RMS norm, over one head or all of them, to a vector of ones: [heads, D]."""
    weight: Tensor = norm.weight
    if weight.numel() not in (dim, heads * dim):
        return None
    made: Tensor = norm(torch.ones_like(weight)[None])[0]
    return made.float().view(-1, dim).expand(heads, dim)


def _by_kv_head(energy: Tensor, layer: LayerFacts) -> Tensor:
    return energy.unflatten(0, (layer.num_kv_heads, -1)).mean(1)
