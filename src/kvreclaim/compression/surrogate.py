"""Prediction of a token's importance from its cached key and value and from its age.

The teacher is a repeated document, with compression assumed after three quarters of the first copy. The
largest attention weight of a token for queries in the rest of that copy measures what the continuation
needs. The largest weight for queries of the second copy measures what a question may need (KVzip's score,
arXiv 2505.23416, without its instruction). The continuation counts e^SOON times as much, since it is certain
to come. Attention is multiplied by the value's contribution to the residual stream, |W_o v| (as in KVzap's
KVzip+, arXiv 2601.07891), because high attention to a small value changes little.


The logarithm of the larger of the two is fitted, for each (layer, KV head), by ridge regression on features
of the cached key and value that do not depend on the token's position, and on its age. So the score is
available at any time, and prefix hits, preemption and chunks do not change it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.scoring import surrogate_features

LEAST_PROBABILITY = 1e-9
SOON = 2.0
"""Nats by which attention of the text going on outweighs that of later questions: on held-out prose the
best compromise between the two (docs/log.md)."""
KNOTS = (64, 128, 256, 512, 1024)
"""Ages in tokens. What a token's age adds to its score is linear in the age's logarithm between two of them,
constant outside, and nothing at the last."""
RIDGE = 1e-3


def num_features(facts: LayerFacts) -> int:
    """Return P of one layer."""
    bands = 0 if facts.rope is None else facts.rope.num_bands
    return (facts.head_dim - bands) + facts.v_head_dim + 3


def age_features(ages: Tensor) -> Tensor:
    """Return age features [..., A] fp64: 1 at each of the KNOTS but the last, falling to 0 at its neighbours.

    ages: [...] tokens since, any integers
    """
    first, last = (float(knot) for knot in (KNOTS[0], KNOTS[-1]))
    place = (ages.double().clamp(first, last) / first).log2()
    knots = torch.arange(len(KNOTS) - 1, dtype=torch.float64, device=ages.device)
    return (1 - (place[..., None] - knots).abs()).clamp_min(0)


def age_scores(weights: Tensor) -> Tensor:
    """Return the score of each age for weights [N, A]: [N, KNOTS[-1] - KNOTS[0] + 1] fp32, from the first
    knot to the last."""
    ages = torch.arange(KNOTS[0], KNOTS[-1] + 1, device=weights.device)
    return (weights.double() @ age_features(ages).T).float()


def weighed(reached: Tensor, values: Tensor, gram: Tensor) -> Tensor:
    """Multiply attention by the value's largest norm after a query head's projection: [P, K, T] fp32.

    reached: [P, K, T] largest attention weight of each token
    values:  [K, T, Dv] any float dtype; gram: [K, G, Dv, Dv] (model.projection.value_grams)
    """
    rows = values.float()[:, None]
    squares = ((rows @ gram.to(rows)) * rows).sum(dim=-1).amax(dim=1)
    return reached * squares.clamp_min(0).sqrt().to(reached)


def needed(reached: Tensor, now: int) -> Tensor:
    """Return the teacher's scores of the tokens before `now`: [K, now], >= 0.

    reached: [3, K, T] worth of each token (weighed) for queries before now, after it, of the second copy
    """
    soon, repeated = reached[1:, :, :now]
    return torch.maximum(soon * math.exp(SOON), repeated)


class SurrogateFit:
    """Sums of the regressions of all layers and heads. Documents are added, not kept."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.num_features = max(num_features(layer) for layer in facts.layers)
        heads = facts.layers[0].num_kv_heads
        width = self.num_features + len(KNOTS) - 1
        shape = (facts.num_layers, heads, width)
        self._moments = torch.zeros(*shape, width, dtype=torch.float64)
        self._products = torch.zeros(shape, dtype=torch.float64)
        self._count = torch.zeros(facts.num_layers, dtype=torch.int64)

    def add(self, layer: int, keys: Tensor, values: Tensor, worth: Tensor) -> None:
        """Add one layer of the part of a document before its compression.

        Args:
            keys, values: as for ops.scoring.surrogate_features
            worth:        [K, T] the teacher's scores, >= 0 (needed)
        """
        features = surrogate_features(keys, values, self.facts.layers[layer].rope).double().cpu()
        heads, tokens, width = features.shape
        ages = age_features(torch.arange(tokens, 0, -1)).expand(heads, -1, -1)
        rows = features.new_zeros(heads, tokens, self._products.shape[-1])
        rows[..., :width], rows[..., self.num_features :] = features, ages
        target = worth.double().cpu().clamp_min(LEAST_PROBABILITY).log()
        self._moments[layer] += rows.transpose(1, 2) @ rows
        self._products[layer] += (target[:, None] @ rows)[:, 0]
        self._count[layer] += tokens

    def build(self) -> tuple[Tensor, Tensor]:
        """Return weights [L, K, P] of the features, 0 for those that a layer lacks, and [L, K, A] of the age,
        both fp32.

        Raises: InvalidArgumentError if a layer has no token.
        """
        if missing := (self._count == 0).nonzero()[:, 0].tolist():
            raise InvalidArgumentError(
                f"layer {missing[0]} has no token to fit; add every layer of a document."
            )
        one = torch.eye(self._products.shape[-1]).double()
        ridge = RIDGE * self._count.double()[:, None, None, None] * one
        # Not torch.linalg.solve: oneMKL's LU of many matrices of this size fails with several threads.
        factors = torch.linalg.cholesky(self._moments + ridge)
        found = torch.cholesky_solve(self._products[..., None], factors)[..., 0].float()
        return found[..., : self.num_features], found[..., self.num_features :]
