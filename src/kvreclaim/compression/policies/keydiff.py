"""KeyDiff: keys that differ from the mean key."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView

_SMALLEST = 1e-12


@dataclass(frozen=True)
class KeyDiff(CompressionPolicy):
    """Ranks tokens by how far their key points away from the mean direction of all live keys:

        score_j = -cos(k_j, mean_i k_i / |k_i|)

    with cached (rotated) keys, per KV head. It needs no queries: distinct keys tend to attract
    attention.

    Paper: arXiv 2504.15364.

    Cost: O(T D) per KV head and a copy of the keys; no state.
    """

    name = "keydiff"
    any_layers = True

    def score(self, view: LayerView) -> Tensor:
        keys = view.keys.float()
        inverse = view.source.key_norms().clamp(min=_SMALLEST).reciprocal()
        anchor = F.normalize(inverse[:, None] @ keys, dim=-1)
        return -(keys @ anchor.mT)[..., 0] * inverse
