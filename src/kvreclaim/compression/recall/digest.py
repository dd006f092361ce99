"""The digest of a page of keys: two corners in 8 bits, from which queries score it.

A page's score is sum_i max(q_i lo_i, q_i hi_i). With the least and greatest entries it bounds every product
q.k from above (Quest, arXiv 2406.10774); with the mean distances from the middle of these it is ArkVale's
cuboid-mean estimate (NeurIPS 2024); with both corners at the mean it is the centroid's product.

U(p; q) = s sum_i max(q_i lo_i, q_i hi_i)                       at least max_j s q.k_j, for bounds
benefit(p) = ln max‖v‖ + max_q U(p; q) - LSE_live(q)            over the group's heads and queries
mixture:  q = R(L + d) mu_c, and s^2/2 sum_f v_{c,f} M_f on top, M_f the most that |K_f|^2 may be
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.stats import LayerStats
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.scoring import offset_phases, turned_queries

LEVELS = 126
"""Levels used of 127, so that a bound may be rounded outwards."""
SLACK = 1e-3
"""Fraction of a level that a bound moves outwards at least, for the rounding of the division."""


@dataclass(frozen=True, slots=True, eq=False)
class Digests:
    """Digests of pages [...]: codes [..., 2, D] int8 (lo, hi), scale [...] fp32 that they are multiplied by,
    value [...] fp32, the longest value vector."""

    codes: Tensor
    scale: Tensor
    value: Tensor

    def corners(self) -> tuple[Tensor, Tensor]:
        """lo, hi [..., D] fp32."""
        numbers = self.codes.float() * self.scale[..., None, None]
        return numbers[..., 0, :], numbers[..., 1, :]

    def __getitem__(self, index: int) -> Digests:
        """Return the digests at one index of the first dim: views."""
        return Digests(self.codes[index], self.scale[index], self.value[index])

    def put(self, at: tuple[Tensor, ...], other: Digests) -> None:
        """Write others [n] at n places, given by an index of each dim."""
        self.codes[at], self.scale[at], self.value[at] = other.codes, other.scale, other.value

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.value.nbytes


def corners_of(keys: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """lo, hi [..., D] fp32 of pages of keys [..., S, D]; kind: schedule.recall.DIGESTS."""
    keys = keys.float()
    if kind == "centroid":
        mean = keys.mean(-2)
        return mean, mean
    lo, hi = keys.amin(-2), keys.amax(-2)
    if kind == "minmax":
        return lo, hi
    middle = (lo + hi) / 2
    spread = (keys - middle[..., None, :]).abs().mean(-2)
    return middle - spread, middle + spread


def digests_of(keys: Tensor, values: Tensor, kind: str) -> Digests:
    """Digest pages of keys [..., S, D] and values [..., S, Dv]. Bounds are rounded outwards, so they stay
    bounds; estimates to the nearest code."""
    both = torch.stack(corners_of(keys, kind), -2)
    scale = (both.abs().amax((-2, -1)) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    codes = both / scale[..., None, None]
    if kind == "minmax":
        codes = torch.stack([(codes[..., 0, :] - SLACK).floor(), (codes[..., 1, :] + SLACK).ceil()], -2)
    else:
        codes = codes.round()
    longest = torch.linalg.vector_norm(values.float(), dim=-1).amax(-1)
    return Digests(codes.to(torch.int8), scale, longest)


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
    """Return [K, P] fp32, per page the logarithm of the largest gain of a query, times its longest value;
    live: [K, N]."""
    gain = (page_scores(queries, digests) * scale - live[..., None]).amax(1)
    return gain + digests.value.clamp(min=1e-30).log()


def mixture_benefit(
    stats: LayerStats, facts: LayerFacts, logical_len: int, digests: Digests, keys: Tensor
) -> Tensor:
    """Return `benefit` [K, P] for the queries of the statistics, at distances OFFSETS; keys: live ones."""
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
