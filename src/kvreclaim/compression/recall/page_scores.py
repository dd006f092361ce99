"""Scores of pages that queries have not read, from their digests and the attention to live tokens.

U(p; q) = s sum_i max(q_i lo_i, q_i hi_i)                       at least max_j s q.k_j, for bounds
benefit(p) = ln max‖v‖ + max_q U(p; q) - LSE_live(q)            over the group's heads and queries
mixture:  q = R(L + d) mu_c, and s^2/2 sum_f v_{c,f} M_f on top, M_f the most that |K_f|^2 may be
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.compression.recall.digest import Digests
from kvreclaim.compression.stats import LayerStats
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.scoring import offset_phases, turned_queries

OFFSETS = (1, 16, 256)


def page_scores(queries: Tensor, digests: Digests) -> Tensor:
    """sum_i max(q_i lo_i, q_i hi_i): queries [K, N, D], digests of [K, P] pages -> [K, N, P] fp32.

    With q+ = max(q, 0) and q- = min(q, 0) it is q+.hi + q-.lo, one product.
    """
    queries = queries.float()
    parts = torch.cat([queries.clamp(max=0), queries.clamp(min=0)], -1)  # [K, N, 2D], as lo, hi lie
    products = torch.matmul(parts, digests.codes.flatten(-2).float().transpose(-1, -2))
    return products * digests.scale[:, None]


def live_mass(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """LSE_live: ln sum_j e^{s q.k_j} of queries [K, N, D] over live keys [K, T, D]: [K, N] fp32."""
    return torch.logsumexp(torch.matmul(queries.float(), keys.float().transpose(-1, -2)) * scale, -1)


def benefit(queries: Tensor, digests: Digests, live: Tensor, scale: float) -> Tensor:
    """[K, P] fp32: of each page the logarithm of the most that a query may gain by it, times its longest
    value; live: [K, N]."""
    gain = (page_scores(queries, digests) * scale - live[..., None]).amax(1)
    return gain + digests.value.clamp(min=1e-30).log()


def mixture_benefit(
    stats: LayerStats, facts: LayerFacts, logical_len: int, digests: Digests, keys: Tensor
) -> Tensor:
    """[K, P]: the same for the queries that the statistics expect, at distances OFFSETS; keys: live ones."""
    assert stats.centers is not None, "checked with the policy"
    assert stats.center_var is not None, "checked with the policy"
    assert facts.rope is not None, "checked with the policy"
    heads, scale = facts.num_kv_heads, facts.softmax.scale
    phases = offset_phases([logical_len], OFFSETS, facts.rope)[0]
    turned = turned_queries(stats.centers, phases[None, None], facts.rope)  # [H | K, C, O, D]
    queries = turned.flatten(1, 2).unflatten(0, (heads, -1)).flatten(1, 2)
    spread = stats.center_var[:, :, None].expand(-1, -1, len(OFFSETS), -1)
    spread = spread.flatten(1, 2).unflatten(0, (heads, -1)).flatten(1, 2)
    lo, hi = digests.corners()
    most = torch.maximum(lo.square(), hi.square())  # per dim: the sum over a band bounds |K_f|^2
    live = live_mass(queries, keys, scale) + 0.0
    extra = torch.matmul(spread.float(), most.transpose(-1, -2)) * (scale * scale / 2)
    gain = (page_scores(queries, digests) * scale + extra - live[..., None]).amax(1)
    return gain + digests.value.clamp(min=1e-30).log()
