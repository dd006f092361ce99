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
from kvreclaim.ops.layer_parts import Gate

TRIAL_ROWS = 5


class FusedExperts:
    """The forward of the experts of one layer; the module's own for tensors that the kernels do not take."""

    def __init__(self, module: Any, gate: Gate, ops: ModuleType) -> None:
        self.module, self.gate, self.ops = module, gate, ops

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own, count = self.module, hidden_states.shape[0]
        weights = (own.gate_up_proj, own.down_proj)
        is_of_one = hidden_states.dtype is top_k_weights.dtype is weights[0].dtype
        if not 0 < count <= self.ops.MOST_ROWS or not is_of_one or torch.is_grad_enabled():
            found: Tensor = type(own).forward(own, hidden_states, top_k_index, top_k_weights)
            return found
        out: Tensor = self.ops.apply_experts(hidden_states, (top_k_index, top_k_weights), weights, self.gate)
        return out


class FusedRouter:
    """The forward of one router: logits, scores and experts of each token."""

    def __init__(self, module: Any, sums_to_one: bool, ops: ModuleType) -> None:
        self.module, self.sums_to_one, self.ops = module, sums_to_one, ops

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = self.module
        x = hidden_states.reshape(-1, own.weight.shape[1])
        if not x.shape[0] or x.dtype is not own.weight.dtype or torch.is_grad_enabled():
            found: tuple[Tensor, Tensor, Tensor] = type(own).forward(own, hidden_states)
            return found
        logits = functional.linear(x, own.weight)
        scores, ids = self.ops.route(logits, own.top_k, sums_to_one=self.sums_to_one)
        return logits, scores, ids


def use_fused_experts(model: nn.Module, layer_ops: ModuleType) -> str:
    """Run routers and experts on the kernels, where these compute the same.

    layer_ops: ops.triton.decoder; for ops.native.decoder there are no such kernels

    Returns: one line that says what runs, empty where none is.
    """
    if layer_ops.NAME != "triton":
        return ""
    found = [module for module in model.modules() if _looks_known(module, layer_ops)]
    if not found:
        return ""
    ops, count = importlib.import_module("kvreclaim.ops.triton.experts"), 0
    for module in found:
        is_router = hasattr(module, "top_k")
        native = _router(module, ops) if is_router else _experts(module, ops, list(layer_ops.GATES))
        if native is not None:
            module.forward = native
            count += not is_router
    return f"experts: {layer_ops.NAME} ({count})" if count else ""


def _looks_known(module: nn.Module, ops: ModuleType) -> bool:
    """Whether its weights are those of a router, or of experts, and of a kind that the kernels take."""
    weights = dict(module.named_parameters())
    shapes = [tuple(weight.shape) for weight in weights.values()]
    if list(weights) == ["gate_up_proj", "down_proj"]:
        fits = len(shapes[0]) == 3 and shapes[0] == (shapes[1][0], 2 * shapes[1][-1], shapes[1][1])
    else:
        fits = (
            list(weights) == ["weight"] and len(shapes[0]) == 2 and isinstance(vars(module).get("top_k"), int)
        )
    return (
        "forward" not in vars(module)
        and fits
        and all(
            weight.dtype in ops.DTYPES and ops.runs_on(weight.device) and weight.is_contiguous()
            for weight in weights.values()
        )
    )


@torch.inference_mode()
def _experts(module: Any, ops: ModuleType, gates: list[Gate]) -> FusedExperts | None:
    """The experts on the kernels, if they make of random rows what the module makes."""
    count, _, width = module.gate_up_proj.shape
    firsts = torch.arange(TRIAL_ROWS)[:, None]
    ids = (firsts + torch.arange(min(2, count))) % count
    like = module.gate_up_proj
    given = (_random(like, width), ids.to(like.device), _random(like, ids.shape[1]))
    try:
        want = module(*given)
    except (TypeError, ValueError, RuntimeError):  # not experts that are called so
        return None
    made = {gate: FusedExperts(module, gate, ops) for gate in gates}
    got = {gate: native(*given) for gate, native in made.items()}
    best = min(got, key=lambda gate: distance(got[gate], want))
    return made[best] if agree(got[best], want) else None


@torch.inference_mode()
def _router(module: Any, ops: ModuleType) -> FusedRouter | None:
    """The router on the kernels, if it chooses for random rows what the module chooses. Of equal logits
    either expert may be the first."""
    x = _random(module.weight, module.weight.shape[1])
    try:
        logits, scores, ids = module(x)
    except (TypeError, ValueError, RuntimeError):  # not a router that is called so
        return None
    for sums_to_one in (False, True):
        native = FusedRouter(module, sums_to_one, ops)
        own = native(x)
        if not agree(own[0], logits) or ids.shape != own[2].shape or ids.dtype is not own[2].dtype:
            continue
        if agree(own[1], scores) and torch.equal(logits.gather(1, own[2]), logits.gather(1, ids)):
            return native
    return None


def _random(like: Tensor, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((TRIAL_ROWS, width), generator=generator).to(like.device, like.dtype)
