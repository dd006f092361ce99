"""Gated MLPs of layers that stay transformers': gate and up in one product, SiLU * up and down in another."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.model.decoder import agree, is_taken, joined, single, weight_dtype
from kvreclaim.model.layer_trial import is_linear
from kvreclaim.model.native_modules import NativeLayer
from kvreclaim.model.quantized.layers import PackedLinear
from kvreclaim.ops.native import decoder as native_layers

PARTS = ("gate_proj", "up_proj", "down_proj")
TRIAL_ROWS = 3


class NativeMlp:
    """The forward of one MLP; the module's own for tensors that the kernels do not take."""

    def __init__(self, module: Any, ops: ModuleType) -> None:
        self.module = module
        self.gate_up = joined([module.gate_proj, module.up_proj], None, ops)
        self.down = single(module.down_proj, ops, is_gated=True)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not self.gate_up.dtype or not x.is_contiguous() or torch.is_grad_enabled():
            forward: Any = type(self.module).forward
            found: Tensor = forward(self.module, x)
            return found
        out: Tensor = self.down(self.gate_up(x.view(-1, x.shape[-1])))
        return out.view(x.shape)


def use_fast_mlps(model: nn.Module, ops: ModuleType = native_layers) -> str:
    """Give every MLP that computes what a NativeMlp computes that as its forward, but those of native layers.

    Returns: one line that describes the native MLPs, empty without any.
    """
    if ops.unavailable_reason() is not None:
        return ""
    taken = {
        layer.mlp
        for module in model.modules()
        if isinstance(layer := vars(module).get("forward"), NativeLayer)
    }
    count = 0
    for module in model.modules():
        if module in taken or not _looks_known(module, ops):
            continue
        if (native := _proved(module, ops)) is not None:
            module.forward = native
            count += 1
    return f"MLPs: {ops.NAME} ({count})" if count else ""


def _looks_known(module: nn.Module, ops: ModuleType) -> bool:
    linears: list[Any] = [getattr(module, name, None) for name in PARTS]
    return (
        "forward" not in vars(module)
        and all(is_linear(each) for each in linears)
        and len({(type(each) is PackedLinear, each.bias is None) for each in linears[:2]}) == 1
        and len({weight_dtype(each) for each in linears}) == 1
        and all(is_taken(each, ops) for each in linears)
    )


@torch.inference_mode()
def _proved(module: Any, ops: ModuleType) -> NativeMlp | None:
    """Return the MLP in kernel calls, if its output for trial rows agrees with the module's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, TRIAL_ROWS, module.gate_proj.in_features), generator=generator)
    (device, *_) = (each.device for each in module.gate_proj.state_dict().values())
    x = x.to(device, weight_dtype(module.gate_proj))
    try:
        want = module(x)
    except (TypeError, ValueError, RuntimeError):  # not a module that maps rows to rows
        return None
    native = NativeMlp(module, ops)
    return native if isinstance(want, Tensor) and agree(native(x), want) else None
