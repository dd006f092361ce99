"""A mixture of experts as a part of its decoder layer: the experts' sum includes the residual and an MLP that
all tokens share, and the norm before it writes the fp32 copy for the router.

A module qualifies if it consists of a router and experts on kernels (model/fused_experts.py) and at most one
MLP, and adds their outputs for random rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.model.decoder import agree
from kvreclaim.model.fused_experts import FusedExperts, FusedRouter
from kvreclaim.model.native_mlp import NativeMlp
from kvreclaim.model.native_modules import NativeLayer

TRIAL_ROWS = 5


class FusedMoe:
    """The experts of one layer, added to a residual.

    is_wide: the router takes fp32 copies of the layer's 16-bit rows
    """

    def __init__(
        self, modules: list[nn.Module], router: FusedRouter, experts: FusedExperts, mlp: Any
    ) -> None:
        """modules: with the hooks that would miss a call; mlp: a NativeMlp, or None."""
        self.modules, self.router, self.experts = modules, router, experts
        self.shared = None if mlp is None else (mlp.gate_up.weight, mlp.down.weight)
        self.dtype: torch.dtype = experts.weights.down.dtype
        self.is_wide = router.module.weight.dtype is not self.dtype

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernels compute rows like x [T, M], and no hook sees them."""
        return (
            0 < x.shape[0] <= self.experts.ops.MOST_ROWS
            and x.dtype is self.dtype
            and not torch.is_grad_enabled()
            and not any(each._forward_hooks or each._forward_pre_hooks for each in self.modules)
        )

    def add_to(self, residual: Tensor, wide: Tensor, x: Tensor) -> Tensor:
        """Add what the module makes of x [T, M] to residual, round once. wide: x in the router's dtype."""
        _, scores, ids = self.router(wide)
        found: Tensor = self.experts.ops.apply_experts(
            x, (ids, scores), self.experts.weights, self.experts.gate, shared=self.shared, residual=residual
        )
        return found


def use_fused_moes(model: nn.Module) -> None:
    """Let native layers compute their mixtures of experts as a part of the layer. Runs after
    use_fused_experts."""
    for module in model.modules():
        layer: Any = vars(module).get("forward")
        if (
            isinstance(layer, NativeLayer)
            and layer.parts.form.gate is None
            and layer.parts.form.after[1] is None
        ):
            layer.parts.fused = _proved(layer.mlp)


@torch.inference_mode()
def _proved(module: nn.Module) -> FusedMoe | None:
    found = _fused(module)
    if found is None:
        return None
    weights = found.experts.weights
    width = weights.down.shape[2 if weights.is_transposed else 1]
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn((TRIAL_ROWS, width), generator=generator).to(weights.down) for _ in range(2))
    made: Any = module(x[None])
    made = made[0] if isinstance(made, tuple) else made  # gpt-oss adds the router's scores
    wide = x.to(found.router.module.weight.dtype)
    return found if agree(found.add_to(residual, wide, x), made[0] + residual) else None


def _fused(module: nn.Module) -> FusedMoe | None:
    """Return the module's parts, if there are no others."""
    parts: dict[nn.Module, Any] = {each: vars(each).get("forward") for each in module.modules()}
    routers, experts, mlps = (
        [each for each in parts.items() if isinstance(each[1], kind)]
        for kind in (FusedRouter, FusedExperts, NativeMlp)
    )
    if len(routers) != 1 or len(experts) != 1 or len(mlps) > 1:
        return None
    known = [each for each, _ in (*routers, *experts, *mlps)]
    own = {id(each) for part in known for each in itertools.chain(part.parameters(), part.buffers())}
    if any(id(each) not in own for each in itertools.chain(module.parameters(), module.buffers())):
        return None
    fused = FusedMoe(known, routers[0][1], experts[0][1], mlps[0][1] if mlps else None)
    weights, ops = fused.experts.weights, fused.experts.ops
    if fused.shared is None:
        return fused
    is_plain = all(isinstance(each, Tensor) for each in fused.shared) and fused.experts.gate == "silu"
    has_bias = any(each.bias is not None for each in (mlps[0][1].gate_up, mlps[0][1].down))
    return fused if is_plain and not has_bias and ops.num_shared(weights, fused.shared) else None
