"""Full cache: no eviction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


@dataclass(frozen=True)
class Full(CompressionPolicy):
    """Keeps every token: the uncompressed baseline. Budget, interval and protection have no effect.

    Cost: none; score returns zeros.
    """

    name = "full"
    eviction_method = EvictionMethod.KEEP
    default_mode = Mode.UNION

    def score(self, view: LayerView) -> Tensor:
        return torch.zeros(view.source.shape, dtype=torch.float32, device=view.source.device)
