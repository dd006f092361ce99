"""Expected Attention: expected attention of Gaussian queries in the near future."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvreclaim.compression.attention import over_group
from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal
from kvreclaim.ops.scoring import as_real, grouped_products, offset_phases, turned_queries
from kvreclaim.options import option

MAX_HORIZON = 1 << 16
"""Memory grows with it, and whoever may send a request may name it."""


@dataclass(frozen=True)
class ExpectedAttention(CompressionPolicy):
    """Ranks a key by its expected attention from queries drawn from a normal distribution.

        l(j) = s mu.K_j + s^2/2 K_j^T C K_j,   S(j) = mean over query heads of softmax_j(l) * ||v_j||

    mu = R m and C = R Sigma R^T with mean m and covariance Sigma of the queries before rotation, R the
    mean rotation over the next `horizon` positions L, L + 1, ... and the softmax scale s: l is the
    logarithm of E[exp(s q.K_j)] for q ~ N(mu, C).

    Paper: arXiv 2510.00636, where m and Sigma come from the prompt; here they are calibrated.

    horizon:    future positions averaged over, tokens; 512 as published
    covariance: False leaves the quadratic term out, and then needs no covariance
    value_norm: multiply by ||v||, as published
    group:      over the query heads of a KV head, "mean" as published or "max"
    Cost: a product of [T, D] by [D, D] per query head; state: the statistics with covariances.
    """

    horizon: int = option(512, low=1, high=MAX_HORIZON)
    covariance: bool = option(True)
    value_norm: bool = option(True)
    group: Literal["mean", "max"] = option("mean")
    name = "expected_attention"
    any_layers = True

    @property
    def needs(self) -> frozenset[Signal]:
        covariance = {Signal.QUERY_COVARIANCE} if self.covariance else set()
        return frozenset({Signal.QUERY_STATS, *covariance})

    def score(self, view: LayerView) -> Tensor:
        assert view.stats is not None, f"layer {view.layer}: no query statistics"
        assert view.facts.rope is not None, f"layer {view.layer}: no verified rotation"
        scale, rope = view.facts.softmax.scale, view.facts.rope
        keys = as_real(view.keys)
        turn = offset_phases([view.logical_len], range(self.horizon), rope)[0].mean(dim=0, keepdim=True)
        logits = scale * grouped_products(turned_queries(view.stats.q_mean, turn, rope), keys)[:, 0]
        if self.covariance:
            assert view.stats.q_cov is not None, f"layer {view.layer}: no query covariances"
            basis = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device)
            turned = turned_queries(basis, turn, rope)[:, 0]  # row d is R applied to dim d
            spread = turned.T @ view.stats.q_cov.to(keys) @ turned
            logits += scale * scale / 2 * _quadratic_forms(keys, spread)
        scores = over_group(logits.softmax(dim=-1), view.source.shape[0], self.group).float()
        return scores * view.source.value_norms() if self.value_norm else scores


def _quadratic_forms(keys: Tensor, matrices: Tensor) -> Tensor:
    """Return K_j^T C_h K_j of each query head and the keys [K, T, D] of its KV head: [H, T]. The query heads
    of a KV head are processed in turn, so that only one copy of the keys exists at a time."""
    kv_heads, tokens, dim = keys.shape
    grouped = matrices.view(kv_heads, -1, dim, dim)
    forms = [((keys @ each) * keys).sum(dim=-1) for each in grouped.unbind(1)]
    return torch.stack(forms, dim=1).view(-1, tokens)
