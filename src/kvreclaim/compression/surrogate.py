"""The importance of a token, predicted from its cached key and value and from its age.

The teacher is a document said twice, without words between, and compressed, in thought, when three quarters
of it have been said once. The rest of it is the text going on: the most that any of its queries pays a token
tells what is needed soon. Whoever writes the document the second time reads the first copy: that tells what
may be asked of it (KVzip's score, arXiv 2505.23416, without its instruction). What is needed soon counts
e^SOON times as much, since it is sure to come. Attention is weighed by what the token's value then adds to
the residual stream, |W_o v| (as in KVzap's KVzip+, arXiv 2601.07891): much attention to a small value
changes little.

The logarithm of the larger of the two is fitted, for each (layer, KV head), by ridge regression on numbers
that the cache holds anyway and that do not depend on the token's position, and on its age. So the score can
be had at any time, and prefix hits, preemption and chunks do not change it.
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
"""Nats by which attention of the text going on outweighs that of what may be asked: on held-out prose the
best compromise between the two (docs/log.md)."""
KNOTS = (64, 128, 256, 512, 1024)
"""Ages in tokens. What a token's age adds to its score is linear in the age's logarithm between two of them,
constant outside, and nothing at the last."""
RIDGE = 1e-3


def num_features(facts: LayerFacts) -> int:
    """P of one layer."""
    bands = 0 if facts.rope is None else facts.rope.num_bands
    return (facts.head_dim - bands) + facts.v_head_dim + 3


def age_features(ages: Tensor) -> Tensor:
    """[..., A] fp64: 1 at each of the KNOTS but the last, falling to 0 at its neighbours.

    ages: [...] tokens since, any integers
    """
    first, last = (float(knot) for knot in (KNOTS[0], KNOTS[-1]))
    place = (ages.double().clamp(first, last) / first).log2()
    knots = torch.arange(len(KNOTS) - 1, dtype=torch.float64, device=ages.device)
    return (1 - (place[..., None] - knots).abs()).clamp_min(0)


def age_scores(weights: Tensor) -> Tensor:
    """Score added by each age, heads with weights [N, A]: [N, KNOTS[-1] - KNOTS[0] + 1] fp32, from the first
    knot to the last."""
    ages = torch.arange(KNOTS[0], KNOTS[-1] + 1, device=weights.device)
    return (weights.double() @ age_features(ages).T).float()


def weighed(reached: Tensor, values: Tensor, gram: Tensor) -> Tensor:
    """Attention times the most that a query head's projection makes of the value: [P, K, T] fp32.

    reached: [P, K, T] the most that queries pay each token
    values:  [K, T, Dv] any float dtype; gram: [K, G, Dv, Dv] (model.projection.value_grams)
    """
    rows = values.float()[:, None]
    squares = ((rows @ gram.to(rows)) * rows).sum(dim=-1).amax(dim=1)
    return reached * squares.clamp_min(0).sqrt().to(reached)


def needed(reached: Tensor, now: int) -> Tensor:
    """The teacher's score of the tokens before `now`: [K, now], >= 0.

    reached: [3, K, T] worth of each token to queries before now, from now on, the second time (weighed)
    """
    soon, asked = reached[1:, :, :now]
    return torch.maximum(soon * math.exp(SOON), asked)


class SurrogateFit:
    """Sums of the regressions of all layers and heads; documents are added, none is kept."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.num_features = max(num_features(layer) for layer in facts.layers)
        heads = facts.layers[0].num_kv_heads
        width = self.num_features + len(KNOTS) - 1
        shape = (facts.num_layers, heads, width)
        self._moments = torch.zeros(*shape, width, dtype=torch.float64)
        self._products = torch.zeros(shape, dtype=torch.float64)
        self._count = torch.zeros(facts.num_layers, dtype=torch.int64)

    def add(self, layer: int, keys: Tensor, values: Tensor, wanted: Tensor) -> None:
        """One layer of the beginning of a document, up to where it is compressed.

        Args:
            keys, values: as for ops.scoring.surrogate_features
            wanted:       [K, T] what each token will be needed for, >= 0 (needed)
        """
        features = surrogate_features(keys, values, self.facts.layers[layer].rope).double().cpu()
        heads, tokens, width = features.shape
        ages = age_features(torch.arange(tokens, 0, -1)).expand(heads, -1, -1)
        rows = features.new_zeros(heads, tokens, self._products.shape[-1])
        rows[..., :width], rows[..., self.num_features :] = features, ages
        target = wanted.double().cpu().clamp_min(LEAST_PROBABILITY).log()
        self._moments[layer] += rows.transpose(1, 2) @ rows
        self._products[layer] += (target[:, None] @ rows)[:, 0]
        self._count[layer] += tokens

    def build(self) -> tuple[Tensor, Tensor]:
        """[L, K, P] and [L, K, A] fp32: weights of the features, 0 for those that a layer lacks, and of the
        age.

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
