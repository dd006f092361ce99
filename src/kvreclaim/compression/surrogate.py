"""What a token will be needed for, guessed from its cached key and value alone.

The teacher is a document said twice, without words between: whoever writes it the second time reads the
first copy, and the most that any later query pays a token tells what it is worth when no question is known.
That is KVzip's score (arXiv 2505.23416) without its instruction. Its logarithm is fitted, for each (layer,
KV head), by ridge regression on numbers that the cache holds anyway and that do not depend on the token's
position. So the score can be had at any time, and prefix hits, preemption and chunks do not change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.scoring import surrogate_features

LEAST_PROBABILITY = 1e-9
_RIDGE = 1e-3


def num_features(facts: LayerFacts) -> int:
    """P of one layer."""
    bands = 0 if facts.rope is None else facts.rope.num_bands
    return (facts.head_dim - bands) + facts.v_head_dim + 3


class SurrogateFit:
    """Sums of the regressions of all layers and heads; documents are added, none is kept."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.num_features = max(num_features(layer) for layer in facts.layers)
        heads = facts.layers[0].num_kv_heads
        shape = (facts.num_layers, heads, self.num_features)
        self._moments = torch.zeros(*shape, self.num_features, dtype=torch.float64)
        self._products = torch.zeros(shape, dtype=torch.float64)
        self._count = torch.zeros(facts.num_layers, dtype=torch.int64)

    def add(self, layer: int, keys: Tensor, values: Tensor, reached: Tensor) -> None:
        """One layer of the first copy of a document.

        Args:
            keys, values: as for ops.scoring.surrogate_features
            reached:      [K, T] the most that a later query has paid each token, 0 to 1
        """
        rows = surrogate_features(keys, values, self.facts.layers[layer].rope).double().cpu()
        wanted = reached.double().cpu().clamp_min(LEAST_PROBABILITY).log()
        width = rows.shape[-1]
        self._moments[layer, :, :width, :width] += rows.transpose(1, 2) @ rows
        self._products[layer, :, :width] += (wanted[:, None] @ rows)[:, 0]
        self._count[layer] += rows.shape[1]

    def build(self) -> Tensor:
        """[L, K, P] fp32 weights; 0 for features that a layer lacks.

        Raises: InvalidArgumentError if a layer has no token.
        """
        if missing := (self._count == 0).nonzero()[:, 0].tolist():
            raise InvalidArgumentError(
                f"layer {missing[0]} has no token to fit; add every layer of a document."
            )
        ridge = _RIDGE * self._count.double()[:, None, None, None] * torch.eye(self.num_features).double()
        return torch.linalg.solve(self._moments + ridge, self._products).float()
