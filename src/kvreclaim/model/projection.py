"""The weights that carry each attention head's output into the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import LayerFacts, ModelFacts

NAMES = ("o_proj", "dense", "out_proj", "wo", "c_proj")
"""Names of the linear layer after attention."""


def output_projections(model: nn.Module, facts: ModelFacts) -> tuple[Tensor, ...]:
    """W_o of every layer by query head, [H, Dv, M] views of the weights: a head's output o [Dv] adds
    o @ W_o[h] to the residual stream (through a norm, in models that have one there).

    Raises: InvalidArgumentError naming the layer where no linear layer of the right shape is found, and for
    a model whose cache holds latents: there a head's output is not yet its values' (W_uv comes in between).
    """
    if any(layer.latent for layer in facts.layers):
        raise InvalidArgumentError(
            f"{facts.name!r} keeps one latent per token for all heads, and what W_o makes of a latent would "
            "take a matrix of its own for each head (W_uv W_o); use a policy that needs no output projection."
        )
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            owners.setdefault(index, []).append(module)
    pairs = zip(facts.ids, facts.layers, strict=True)
    return tuple(_projection(owners.get(layer, []), layer, shape, facts.name) for layer, shape in pairs)


def _projection(owners: list[nn.Module], layer: int, shape: LayerFacts, name_of_model: str) -> Tensor:
    for owner in owners:
        for name in NAMES:
            linear = getattr(owner, name, None)
            if isinstance(linear, nn.Linear) and linear.in_features == shape.num_heads * shape.v_head_dim:
                weight = linear.weight.detach()
                if weight.is_floating_point() and weight.shape == (linear.out_features, linear.in_features):
                    return weight.view(-1, shape.num_heads, shape.v_head_dim).permute(1, 2, 0)
    raise InvalidArgumentError(
        f"the output projection of attention layer {layer} of {name_of_model!r} was not found (a plain "
        f"linear layer named {', '.join(NAMES)}); use a policy that does not need it."
    )
