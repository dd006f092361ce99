"""The weights that carry each attention head's output into the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts

NAMES = ("o_proj", "dense", "out_proj", "wo", "c_proj")
"""Names of the linear layer after attention."""


def output_projections(model: nn.Module, facts: ModelFacts) -> tuple[Tensor, ...]:
    """W_o of every layer by query head, [H, Dv, M] views of the weights: a head's output o [Dv] adds
    o @ W_o[h] to the residual stream (through a norm, in models that have one there).

    Raises: InvalidArgumentError naming the layer where no linear layer of the right shape is found, and for
    a model with a cache of latents: there a head's output is not yet its values' (W_uv comes in between).
    """
    if any(layer.latent for layer in facts.layers):
        raise InvalidArgumentError(
            f"{facts.name!r} keeps one latent per token for all heads, and what W_o makes of a latent would "
            "take a matrix of its own for each head (W_uv W_o); use a policy that needs no output projection."
        )
    found = _linears(model, facts)
    for index, linear in zip(facts.ids, found, strict=True):
        weight = linear.weight.detach() if isinstance(linear, nn.Linear) else None
        if weight is None or not weight.is_floating_point() or weight.dim() != 2:
            raise InvalidArgumentError(
                f"the output projection of attention layer {index} of {facts.name!r} was not found (a plain "
                f"linear layer named {', '.join(NAMES)}); use a policy that does not need it."
            )
    return tuple(
        linear.weight.detach().view(-1, shape.num_heads, shape.v_head_dim).permute(1, 2, 0)
        for linear, shape in zip(found, facts.layers, strict=True)
    )


def value_grams(model: nn.Module, facts: ModelFacts) -> Iterator[Tensor]:
    """W_o^T W_o of every layer by query head, [K, G, Dv, Dv] fp32: v @ gram @ v is the squared norm of what a
    value adds to the residual stream. Packed weights are read through their own product. Where no projection
    is found, or a cache holds latents, the identity: the value's own norm counts."""
    dtype = next(model.parameters()).dtype
    for linear, shape in zip(_linears(model, facts), facts.layers, strict=True):
        one = torch.eye(shape.v_head_dim, device=facts.device)
        heads = (shape.num_kv_heads, shape.group_size)
        if linear is None or shape.latent:
            yield one.expand(*heads, -1, -1)
            continue
        bias = getattr(linear, "bias", None)
        rows = linear(torch.eye(linear.in_features, device=facts.device, dtype=dtype)).float()
        rows = (rows if bias is None else rows - bias.float()).unflatten(0, (*heads, shape.v_head_dim))
        yield rows @ rows.mT


def _linears(model: nn.Module, facts: ModelFacts) -> list[Any]:
    """Return the linear layer behind each layer's attention, plain or packed; None where there is none."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            owners.setdefault(index, []).append(module)
    return [
        next(
            (
                linear
                for owner in owners.get(layer, [])
                for name in NAMES
                if getattr(linear := getattr(owner, name, None), "in_features", None)
                == shape.num_heads * shape.v_head_dim
            ),
            None,
        )
        for layer, shape in zip(facts.ids, facts.layers, strict=True)
    ]
