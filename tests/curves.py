"""Loss curves made by hand."""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.compression.loss_curve import LossCell, LossCurve

Losses = Mapping[int, float]
"""Of every document, by budget."""


def cell(content: str, num_tokens: int, losses: Losses) -> LossCell:
    rows = (tuple(losses.values()),) * 19
    return LossCell(content=content, num_tokens=num_tokens, right=0.5, budgets=tuple(losses), losses=rows)


def curve(policy: str, losses: Mapping[tuple[str, int], Losses]) -> LossCurve:
    """losses: by content and length"""
    return LossCurve(policy=policy, cells=tuple(cell(*place, row) for place, row in losses.items()))
