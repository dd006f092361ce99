"""Run a loaded model's linear layers and RMS norms on kernels of its device, without touching a weight."""

from __future__ import annotations

import inspect
from types import ModuleType

import torch
from torch import Tensor, nn

from kvreclaim.ops.native import decoder as native_layers
from kvreclaim.ops.native.linear import DTYPES, UNLIMITED, linear, max_rows

EPS_NAMES = ("variance_epsilon", "eps")
PROBE_SCALES = (1e-4, 1.0, 100.0)
"""Sizes of the trial rows: the first is so small that eps decides."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative; an output is rounded twice, so it may be off by two steps where a sum's last bit decides."""


class NativeLinear(nn.Linear):
    """nn.Linear that multiplies with ops.native.linear; weights, hooks and state_dict are nn.Linear's."""

    def forward(self, input: Tensor) -> Tensor:
        parameters = self._parameters  # attribute access would search three dicts
        return linear(input, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


def use_fast_linears(model: nn.Module) -> str:
    """Turn every plain nn.Linear with fp32 or bf16 weights on the CPU into a NativeLinear.

    Only the module's class changes, so tied weights stay tied. Subclasses, parametrised and quantised
    layers are left alone. Calling it again changes nothing.

    Returns: one line that says what runs.
    """
    problem = native_layers.unavailable_reason()
    if problem is not None:
        return f"linear layers: torch ({problem})"
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in linears:
        if _is_plain(module):
            module.__class__ = NativeLinear
    native = [module for module in linears if type(module) is NativeLinear]
    if not native:
        return "linear layers: torch (none is a plain nn.Linear with float32 or bfloat16 weights on the CPU)"
    limits = sorted({max_rows(module.weight.dtype) for module in native})
    rows = "" if limits[0] >= UNLIMITED else f" up to {limits[0]} rows, torch above"
    rest = f"; {len(linears) - len(native)} others: torch" if len(native) < len(linears) else ""
    return f"linear layers: native{rows} ({len(native)}){rest}"


def _is_plain(module: nn.Linear) -> bool:
    weight = module._parameters.get("weight")
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and weight.is_contiguous()
    )


class NativeNorm:
    """The forward of one norm: the kernel, or the module's own for tensors that the kernel does not take."""

    def __init__(self, module: nn.Module, eps: float, from_one: bool, ops: ModuleType) -> None:
        self.module = module
        self.eps = eps
        self.from_one = from_one
        self.takes, self.norm = ops.takes_norm, ops.rms_norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module._parameters["weight"]
        if weight is None or not self.takes(hidden_states, weight):
            return type(self.module).forward(self.module, hidden_states)
        found: Tensor = self.norm(hidden_states, weight, self.eps, from_one=self.from_one)
        return found


def use_fast_norms(model: nn.Module, ops: ModuleType = native_layers) -> str:
    """Give every norm that computes what ops.rms_norm computes the kernel as its forward.

    A norm is a module with one vector `weight`, no buffers and no children, an eps, and one argument (gated
    norms of recurrent layers have two); whether it is *this* norm is decided by running it on trial rows.
    Weights and state_dict stay as they are.

    ops: as kernels_of (model/decoder.py) gives it
    Returns: one line that says what runs.
    """
    problem = ops.unavailable_reason()
    if problem is not None:
        return f"norms: torch ({problem})"
    count = 0
    for module in model.modules():
        eps = _eps(module, ops)
        if eps is None:
            continue
        for from_one in (False, True):
            if _computes_rms_norm(module, eps, from_one, ops):
                module.forward = NativeNorm(module, eps, from_one, ops)
                count += 1
                break
    return f"norms: {ops.NAME} ({count})" if count else "norms: torch (none is a plain RMS norm)"


def _eps(module: nn.Module, ops: ModuleType) -> float | None:
    """Return the module's eps if it could be a norm, else None."""
    own = list(module.parameters())
    plain = len(own) == 1 and not list(module.buffers()) and not list(module.children())
    if not plain or "forward" in vars(module) or len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1:
        return None
    if not ops.runs_on(weight.device) or weight.dtype not in ops.DTYPES:
        return None
    return next(
        (float(value) for name in EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None
    )


@torch.inference_mode()
def _computes_rms_norm(module: nn.Module, eps: float, from_one: bool, ops: ModuleType) -> bool:
    """Return whether module and kernel agree within rounding on trial rows."""
    weight = module._parameters["weight"]
    assert weight is not None
    if from_one and not ops.has_norm_from_one():
        return False
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn((len(PROBE_SCALES), weight.numel()), generator=generator)
        * torch.tensor(PROBE_SCALES)[:, None]
    )
    x = x.to(weight.device, weight.dtype)
    try:
        expected = module(x)
    except (TypeError, ValueError, RuntimeError):  # not a module that maps rows to rows
        return False
    if not isinstance(expected, Tensor) or expected.shape != x.shape or expected.dtype is not x.dtype:
        return False
    found = ops.rms_norm(x, weight, eps, from_one=from_one)
    tiny = torch.finfo(x.dtype).smallest_normal * TOLERANCE[x.dtype]
    return torch.allclose(found, expected, rtol=TOLERANCE[x.dtype], atol=tiny)
