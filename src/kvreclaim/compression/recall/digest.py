"""The digest of a page of keys: two corners in 8 bits, from which queries score it.

A page's score is sum_i max(q_i lo_i, q_i hi_i). With the least and greatest entries it bounds every product
q.k from above (Quest, arXiv 2406.10774); with the mean distances from the middle of these it is ArkVale's
cuboid-mean estimate (NeurIPS 2024); with both corners at the mean it is the centroid's product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
        """The digests at one index of the first dim: views."""
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
