"""An example policy: keep tokens with large values; a value counts less the older it is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView
from kvreclaim.options import option


@dataclass(frozen=True)
class FadingValues(CompressionPolicy):
    """score = |v| 2^(-age / half_life), age in live tokens. Cost: one norm per token, no state."""

    half_life: float = option(512.0, low=1, high=1e9)
    name = "fading_values"

    def score(self, view: LayerView) -> Tensor:  # [K, T] fp32, higher = keep
        age = torch.arange(view.source.shape[1], 0, -1, device=view.source.device)
        return view.source.value_norms() * 2 ** (-age / self.half_life)
