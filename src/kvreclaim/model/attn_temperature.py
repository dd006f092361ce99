"""Queries that are scaled by their position (Llama 4's layers without rotation).

transformers' layer counts positions from the length of its own cache; in a step of many sequences they are
the tokens' own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def use_token_positions(model: nn.Module) -> None:
    """Let the attention function scale what such layers would have scaled themselves; only the instances
    change. Source: arXiv 2501.19399; transformers, modeling_llama4.py."""
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not getattr(attention, "use_rope", True):
            attention.attn_temperature_tuning = False
            layer.register_forward_pre_hook(partial(_with_scale, attention), with_kwargs=True)


def scales(positions: Tensor, floor_scale: float, attn_scale: float) -> Tensor:
    """fp32, of the shape of positions: what queries are multiplied with."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0


def _with_scale(
    attention: Any, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Keyword arguments go down to the attention function."""
    found = scales(kwargs["position_ids"], attention.floor_scale, attention.attn_scale)
    return args, {**kwargs, "query_scale": found}
