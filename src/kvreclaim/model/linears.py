"""Run a loaded model's linear layers on the native kernels, in place and without touching a weight."""

from __future__ import annotations

from torch import Tensor, nn

from kvreclaim.ops.extension import unavailable_reason
from kvreclaim.ops.native.linear import DTYPES, UNLIMITED, linear, max_rows


class NativeLinear(nn.Linear):
    """nn.Linear whose product is ops.native.linear; weights, names, hooks and state_dict stay nn.Linear's."""

    def forward(self, input: Tensor) -> Tensor:
        parameters = self._parameters  # attribute access would search three dicts
        return linear(input, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


def use_fast_linears(model: nn.Module) -> str:
    """Turn every plain nn.Linear with fp32 or bf16 weights on the CPU into a NativeLinear.

    Only the module's class changes, so tied weights stay tied. Subclasses, parametrised and quantised
    layers are left alone. Calling it again changes nothing.

    Returns: one line that says what runs.
    """
    problem = unavailable_reason()
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
