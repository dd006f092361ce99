"""By what the key channels of a coded cache are divided, and their queries multiplied (ops/scaled_keys.py).

Some channels are many times as large as others of their head: Qwen2.5's keys have biases of some hundreds,
and the weights of norms over keys differ as much. The step of a code follows the largest channel. With K and
Q the sizes of a channel's keys and queries, d = sqrt(K / Q) makes the error of scores least if codes are of
rotated vectors: sum d^2 Q^2 sum K^2 / d^2 has its minimum there (Cauchy-Schwarz). Of int8, whose best d is K,
it removes most.

Sizes are told from weights alone, so they are the same at every start.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.ops.facts import LayerFacts, ModelFacts

FLOOR = 1 / 256
"""Energy that every channel has besides its own, in means of its head: a weight of a norm may be zero."""
SPREAD = 4.0
"""Energy of a channel without bias: what inputs make of it is of size one to four in every layer."""


@torch.inference_mode()
def key_scales(model: nn.Module, facts: ModelFacts) -> tuple[Tensor, ...] | None:
    """[K, D] fp32 powers of two of each layer, equal in both dims of a rotary band.

    None of a model whose sizes neither norms over queries and keys nor their biases tell, and of one with
    latents.
    """
    modules = [each for each in model.modules() if isinstance(getattr(each, "layer_idx", None), int)]
    modules = [each for each in modules if hasattr(each, "q_proj") and hasattr(each, "k_proj")]
    if len(modules) != facts.num_layers or any(each.latent or each.rope is None for each in facts.layers):
        return None
    found = [_sizes(module, layer) for module, layer in zip(modules, facts.layers, strict=True)]
    scales = [_scale(own, layer) for own, layer in zip(found, facts.layers, strict=True) if own is not None]
    if len(scales) < facts.num_layers or all(bool((each == 1).all()) for each in scales):
        return None
    return tuple(scales)


def scales_digest(scales: tuple[Tensor, ...]) -> str:
    """What tells caches with other scales apart."""
    exponents = torch.stack(scales).log2().to(torch.int8).cpu()
    return hashlib.sha256(exponents.numpy().tobytes()).hexdigest()[:16]


def _sizes(module: Any, layer: LayerFacts) -> tuple[Tensor, Tensor] | None:
    """Energies of a layer's keys [K, D] and of its queries [H, D], each head in units of its own; None:
    unknown."""
    heads = (layer.num_kv_heads, layer.num_heads)
    norms = [getattr(module, name, None) for name in ("k_norm", "q_norm")]
    linears = (module.k_proj, module.q_proj)
    if all(getattr(norm, "weight", None) is not None for norm in norms):
        key, query = (_of_norm(norm, n, layer.head_dim) for norm, n in zip(norms, heads, strict=True))
    elif all(getattr(linear, "bias", None) is not None for linear in linears):
        key, query = (_of_bias(linear, n, layer.head_dim) for linear, n in zip(linears, heads, strict=True))
    else:
        return None
    return None if key is None or query is None else (key, query)


def _of_norm(norm: Any, heads: int, dim: int) -> Tensor | None:
    """What an RMS norm, over a head or over all of them, makes of a vector of ones."""
    weight: Tensor = norm.weight
    if weight.numel() not in (dim, heads * dim):
        return None
    made: Tensor = norm(torch.ones_like(weight)[None])[0]
    return made.float().square().view(-1, dim).expand(heads, dim)


def _of_bias(linear: Any, heads: int, dim: int) -> Tensor | None:
    """A bias, and what inputs add to it."""
    bias: Tensor = linear.bias
    return None if bias.numel() != heads * dim else bias.float().square().view(heads, dim) + SPREAD


def _scale(sizes: tuple[Tensor, Tensor], layer: LayerFacts) -> Tensor:
    key, query = sizes
    query = query.unflatten(0, (layer.num_kv_heads, -1)).mean(1)
    both = [_in_bands(each, layer) for each in (key, query)]
    key, query = (each + FLOOR * each.mean(-1, keepdim=True) for each in both)
    exponents = (key / query).double().log2() / 4
    return (exponents - exponents.mean(-1, keepdim=True)).round().exp2().float()


def _in_bands(energy: Tensor, layer: LayerFacts) -> Tensor:
    """[K, D] with the mean of a rotary band in both of its dims."""
    assert layer.rope is not None, "asked before"
    first, second = layer.rope.bands
    energy = energy.clone()
    energy[:, first] = energy[:, second] = (energy[:, first] + energy[:, second]) / 2
    return energy
