"""A policy of one's own: large values, the more so the newer they are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.checks import check_number
from kvreclaim.compression import CompressionPolicy, LayerView


@dataclass(frozen=True)
class FadingValues(CompressionPolicy):
    """score = |v| 2^(-age / half_life), age in live tokens. Cost: one norm per token, no state."""

    half_life: float = 512.0
    name = "fading_values"

    def __post_init__(self) -> None:
        check_number("fading_values option 'half_life'", self.half_life, 1, 1e9)

    def score(self, view: LayerView) -> Tensor:  # [K, T] fp32, higher = keep
        age = torch.arange(view.source.shape[1], 0, -1, device=view.source.device)
        return view.source.value_norms() * 2 ** (-age / self.half_life)
