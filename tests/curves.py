"""Loss curves made by hand."""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.compression.loss_curve import LossCell, LossCurve

Losses = Mapping[int, float]
"""Losses of every document, by budget."""
Places = Mapping[tuple[str, int], Losses]
"""Losses by content and length."""
DENSITIES = {"auto": 1.0, "fp16": 1.0, "int8": 2.0, "int4": 4.0}
"""Densities of a LossCell, in round numbers."""


def cell(content: str, num_tokens: int, losses: Losses, kv_cache_dtype: str = "auto") -> LossCell:
    return LossCell(
        content=content,
        num_tokens=num_tokens,
        right=0.5,
        kv_cache_dtype=kv_cache_dtype,
        density=DENSITIES[kv_cache_dtype],
        budgets=tuple(losses),
        losses=(tuple(losses.values()),) * 19,
    )


def curve(policy: str, losses: Places, coded: Mapping[str, Places] | None = None) -> LossCurve:
    """losses: in the model's dtype; coded: by KV cache dtype"""
    found = {"auto": losses, **(coded or {})}
    cells = (cell(*place, row, form) for form, places in found.items() for place, row in places.items())
    return LossCurve(policy=policy, cells=tuple(cells))
