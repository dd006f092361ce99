"""Mixtures of experts in few launches of a decode step: the choice of the router, and the experts' products.

Routers and experts are taken by the shapes of their weights and proved by random rows. Longer steps get
transformers' code.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvreclaim.model.decoder import agree, distance
from kvreclaim.ops.layer_parts import ClampedGate, Gate

TRIAL_ROWS = 5
SHIFT = "e_score_correction_bias"
CLAMPED = 64.0
"""How many times larger are rows that reach the limit of a clamped gate."""
EXPERTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")


class FusedExperts:
    """The forward of the experts of one layer; the module's own for tensors that the kernels do not take."""

    def __init__(self, module: Any, gate: Gate | ClampedGate, ops: ModuleType) -> None:
        self.module, self.gate, self.ops = module, gate, ops
        self.weights = ops.ExpertWeights(
            module.gate_up_proj,
            module.down_proj,
            (module.gate_up_proj_bias, module.down_proj_bias) if hasattr(module, BIASES[0]) else None,
            is_transposed=getattr(module, "is_transposed", False),
            is_interleaved=not getattr(module, "is_concatenated", True),
        )

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own, count = self.module, hidden_states.shape[0]
        is_of_one = hidden_states.dtype is self.weights.down.dtype
        if not 0 < count <= self.ops.MOST_ROWS or not is_of_one or torch.is_grad_enabled():
            found: Tensor = type(own).forward(own, hidden_states, top_k_index, top_k_weights)
            return found
        routed = (top_k_index, top_k_weights)
        out: Tensor = self.ops.apply_experts(hidden_states, routed, self.weights, self.gate)
        return out


class FusedRouter:
    """The forward of one router: logits, scores and experts of each token."""

    def __init__(self, module: Any, choice: Any, ops: ModuleType) -> None:
        """choice: an ops.RouterChoice."""
        self.module, self.choice, self.ops = module, choice, ops

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = self.module
        x = hidden_states.reshape(-1, own.weight.shape[1])
        if self.choice.is_sigmoid:
            x = x.float()
        if not x.shape[0] or x.dtype is not own.weight.dtype or torch.is_grad_enabled():
            found: tuple[Tensor, Tensor, Tensor] = type(own).forward(own, hidden_states)
            return found
        logits = functional.linear(x, own.weight, getattr(own, "bias", None))
        scores, ids = self.ops.route(logits, self.choice, getattr(own, SHIFT, None))
        return logits, scores, ids


def use_fused_experts(model: nn.Module, layer_ops: ModuleType) -> str:
    """Run routers and experts on the kernels, where these compute the same.

    layer_ops: ops.triton.decoder; for ops.native.decoder there are no such kernels

    Returns: one line that describes the fused experts, empty without any.
    """
    if layer_ops.NAME != "triton":
        return ""
    found = [module for module in model.modules() if _looks_known(module, layer_ops)]
    if not found:
        return ""
    ops, count = importlib.import_module("kvreclaim.ops.triton.experts"), 0
    for module in found:
        is_router = hasattr(module, "top_k")
        native = _router(module, ops) if is_router else _experts(module, ops, [*layer_ops.GATES])
        if native is not None:
            module.forward = native
            count += not is_router
    return f"experts: {layer_ops.NAME} ({count})" if count else ""


def _looks_known(module: nn.Module, ops: ModuleType) -> bool:
    """Whether its weights are those of a router, or of experts, and of a kind that the kernels take."""
    weights = dict(module.named_parameters())
    if set(weights) in ({*EXPERTS}, {*EXPERTS, *BIASES}):
        up, down = (weights[name].shape[1:] for name in EXPERTS)
        if getattr(module, "is_transposed", False):
            up, down = up[::-1], down[::-1]
        fits = len(down) == 2 and tuple(up) == (2 * down[1], down[0])
    else:
        is_linear = list(weights) in (["weight"], ["weight", "bias"])
        fits = is_linear and weights["weight"].dim() == 2 and isinstance(vars(module).get("top_k"), int)
    return (
        "forward" not in vars(module)
        and fits
        and all(
            weight.dtype in ops.DTYPES and ops.runs_on(weight.device) and weight.is_contiguous()
            for weight in weights.values()
        )
    )


@torch.inference_mode()
def _experts(module: Any, ops: ModuleType, gates: list[Gate | ClampedGate]) -> FusedExperts | None:
    """The experts on the kernels, if they make of random rows what the module makes; with a clamped gate also
    of rows so large that it is clamped."""
    alpha, limit = (getattr(module, name, None) for name in ("alpha", "limit"))
    clamped = None if alpha is None or limit is None else ClampedGate(alpha, limit)
    made = [FusedExperts(module, gate, ops) for gate in ([clamped] if clamped else gates)]
    given = _routed_rows(module)
    try:
        want = module(*given)
    except (TypeError, ValueError, RuntimeError):  # not experts that are called so
        return None
    best = min(made, key=lambda native: distance(native(*given), want))
    if clamped:
        x, *routed = given
        large = (CLAMPED * x, *routed)
        if not agree(best(*large), module(*large)):
            return None
    return best if agree(best(*given), want) else None


def _routed_rows(module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, and each one's experts and their scores."""
    count, *sizes = module.gate_up_proj.shape
    width = sizes[0 if getattr(module, "is_transposed", False) else 1]
    firsts = torch.arange(TRIAL_ROWS)[:, None]
    ids = (firsts + torch.arange(min(2, count))) % count
    like = module.gate_up_proj
    return _random(like, width), ids.to(like.device), _random(like, ids.shape[1])


@torch.inference_mode()
def _router(module: Any, ops: ModuleType) -> FusedRouter | None:
    """The router on the kernels, if it chooses for random rows what the module chooses. Of equal logits
    either expert may be the first."""
    x = _random(module.weight, module.weight.shape[1])
    try:
        logits, scores, ids = module(x)
    except (TypeError, ValueError, RuntimeError):  # not a router that is called so
        return None
    for choice in _choices(module, ops):
        native = FusedRouter(module, choice, ops)
        own = native(x)
        if not agree(own[0], logits) or ids.shape != own[2].shape or ids.dtype is not own[2].dtype:
            continue
        (found, picked), (want, expected) = (_in_order(logits, *each) for each in (own[1:], (scores, ids)))
        if agree(found, want) and torch.equal(picked, expected):
            return native
    return None


def _choices(module: Any, ops: ModuleType) -> list[Any]:
    """Return the router's possible functions by its attributes: softmax, or sigmoids with a choice shift."""
    how: dict[str, Any] = {"top": module.top_k}
    shift = getattr(module, SHIFT, None)
    groups: list[Any] = [
        getattr(module, name, None) for name in ("num_group", "topk_group", "routed_scaling_factor")
    ]
    if isinstance(shift, Tensor) and shift.dtype is torch.float32:
        if None in groups or groups[0] > ops.MOST_GROUPS:
            return []
        how |= {"is_sigmoid": True, "groups": groups[0], "top_groups": groups[1], "scale": float(groups[2])}
    return [ops.RouterChoice(sums_to_one=sums_to_one, **how) for sums_to_one in (False, True)]


def _in_order(logits: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, and logits of the chosen experts, in the order of the logits."""
    chosen = logits.gather(1, ids)
    order = chosen.argsort(1)
    return scores.gather(1, order), chosen.gather(1, order)


def _random(like: Tensor, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((TRIAL_ROWS, width), generator=generator).to(like.device, like.dtype)
