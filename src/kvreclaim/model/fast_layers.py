"""Decoder layers of a loaded model on kernels of its device: which are tried, and what runs."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from kvreclaim.model.decoder import is_taken, proved, weight_dtype
from kvreclaim.model.latent import hands_out_latents
from kvreclaim.model.latent_layer import proved_latent
from kvreclaim.model.layer_trial import is_linear, is_norm, observe_layers
from kvreclaim.ops.native import decoder as native_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_fast_layers(model: PreTrainedModel, ops: ModuleType = native_layers) -> str:
    """Give every decoder layer that computes what a NativeLayer computes that as its forward.

    It runs after use_fast_norms, which proves the norms, and use_latent_cache. Nothing may replace weights
    after it. If one layer is not proved, none is replaced.

    ops: ops.native.decoder or ops.triton.decoder
    Returns: one line that describes the native parts.
    """
    problem = ops.unavailable_reason()
    if problem is not None:
        return f"decoder layers: transformers ({problem})"
    layers = [module for module in model.modules() if _looks_known(module, ops)]
    if not layers:
        return (
            "decoder layers: transformers (none has attention and an MLP of linear layers, with RMS norms "
            f"and weights that the {ops.NAME} kernels take)"
        )
    seen = observe_layers(model, layers)
    for module in layers:
        native = None
        if module in seen:
            native = (proved_latent if seen[module].call.latent else proved)(module, seen[module], ops)
        if native is None:
            name = type(module).__name__
            _restore(layers)
            return f"decoder layers: transformers (a {name} does not compute what the kernels do)"
        module.forward = native
    return f"decoder layers: {ops.NAME} ({len(layers)})"


def _restore(layers: list[nn.Module]) -> None:
    for module in layers:
        vars(module).pop("forward", None)


def _looks_known(module: nn.Module, ops: ModuleType) -> bool:
    """Return whether it has attention and an MLP of linear layers that the kernels take, and RMS norms."""
    parts = [getattr(module, name, None) for name in ("self_attn", "mlp")]
    if "forward" in vars(module) or not all(isinstance(part, nn.Module) for part in parts):
        return False
    linears = [[each for each in part.modules() if is_linear(each)] for part in parts]  # type: ignore[union-attr]
    together = [*linears[0], *linears[1]]
    norms: list[Any] = [each for each in module.modules() if is_norm(each)]
    attention: Any = module.self_attn
    has_latents = hands_out_latents(attention)
    return (
        isinstance(getattr(attention, "layer_idx", None), int)
        and norms != []
        and (not ops.PLAIN_ALONE if has_latents else len(linears[0]) in (2, 4))
        and not (ops.PLAIN_ALONE and any(each.forward.from_one for each in norms))
        and not (ops.PLAIN_ALONE and len(linears[1]) not in (2, 3))
        and len({weight_dtype(each) for each in together}) == 1
        and all(is_taken(each, ops) for each in together)
    )
