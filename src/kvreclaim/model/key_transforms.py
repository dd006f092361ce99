"""The centre and the scale of every key channel of a coded cache (ops/transformed_keys.py).

The range of a code is spent on what keys have in common: projections of Qwen2.5 have key biases of some
hundreds, which the rotation hardly moves in bands that turn slowly. The centre takes off the mean of the
rotated keys. Scales then balance what is left: with K the energy of a channel's centred keys and Q that of
its queries, d = (K / Q)^(1/4) makes the error of scores least if codes are of rotated vectors, since
sum d^2 Q sum K / d^2 has its minimum there (Cauchy-Schwarz).

Means and energies before rotation come from the statistics of a calibration. Without statistics they come
from the weights: from norms over queries and keys, else from biases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.ops.facts import KeyStats, KeyTransform, LayerFacts, ModelFacts
from kvreclaim.ops.rope import RopeLayout, from_bands, to_bands

FLOOR = 1 / 256
"""Energy that every channel has besides its own, in means of its head: a weight of a norm may be zero."""
SPREAD = 4.0
"""Energy of a channel besides its bias: what inputs make of it is of size one to four in every layer."""
SHORTEST, LONGEST, LENGTHS = 256, 32_768, 32
"""Lengths of sequences over which the mean of a rotated key is taken: spaced evenly by their logarithm, up to
what the model has positions for."""


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
    if stats is None or any(layer.latent or layer.rope is None for layer in facts.layers):
        return None
    made = tuple(_transform(own, layer, facts) for own, layer in zip(stats, facts.layers, strict=True))
    return None if all(bool((own.scale == 1).all() and (own.center == 0).all()) for own in made) else made


def transforms_digest(transforms: Sequence[KeyTransform]) -> str:
    """Identifies transforms: caches with different ones cannot exchange blocks."""
    digest = hashlib.sha256()
    for own in transforms:
        for part in (own.scale, own.center):
            digest.update(part.float().cpu().numpy().tobytes())
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


def _transform(own: KeyStats, layer: LayerFacts, facts: ModelFacts) -> KeyTransform:
    rope = layer.rope
    assert rope is not None, "key_transforms has checked it"
    center = torch.zeros_like(own.mean)
    if layer.softmax.sinks is None and layer.softmax.softcap is None:
        center = _rotated_mean(own.mean, rope, facts.max_position)
    key, query = (_in_bands(energy, rope) for energy in (own.energy, own.query_energy))
    key = (key - _in_bands(center.square(), rope)).clamp_min(0)
    key, query = (each + FLOOR * each.mean(-1, keepdim=True) for each in (key, query))
    exponents = (key / query).double().log2() / 4
    scale = (exponents - exponents.mean(-1, keepdim=True)).round().exp2().float()
    return KeyTransform(scale, center)


def _rotated_mean(mean: Tensor, rope: RopeLayout, max_position: int) -> Tensor:
    """Return the mean of keys [K, D] over positions, from that before rotation."""
    if rope.num_bands == 0:
        return mean
    longest = max(SHORTEST, min(max_position, LONGEST))
    lengths = torch.logspace(0, 1, LENGTHS, longest / SHORTEST, dtype=torch.float64) * SHORTEST
    angle = lengths[:, None] * rope.inv_freq.cpu()  # [lengths, F]
    # e^{i w p}, averaged over positions p < length, then over lengths
    turn = torch.polar(torch.sinc(angle / (2 * torch.pi)), angle / 2).mean(0)
    rest = mean[:, rope.rest_dims(mean.shape[-1], mean.device)]
    return from_bands(to_bands(mean, rope) * turn.to(mean.device, torch.complex64), rest, rope)


def _in_bands(energy: Tensor, rope: RopeLayout) -> Tensor:
    """[K, D] with the mean of a rotary band in both of its dims: rotation mixes them."""
    first, second = rope.bands
    energy = energy.clone()
    energy[:, first] = energy[:, second] = (energy[:, first] + energy[:, second]) / 2
    return energy
