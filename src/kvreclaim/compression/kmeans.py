"""k-means over the queries of one layer, all heads at once, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError

CHUNK_ELEMENTS = 1 << 23  # fp32 elements of one chunk of queries: 32 MiB


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """centers: [H, C, D]; variances: [H, C, D], population, per dim; weights: [H, C], rows sum to 1.

    All fp32. A cluster without members has weight 0 and repeats its head's heaviest one, so that it
    cannot change a maximum over clusters.
    """

    centers: Tensor
    variances: Tensor
    weights: Tensor


def kmeans(points: Tensor, num_clusters: int, seed: int, *, rounds: int = 15) -> Clusters:
    """Lloyd's algorithm with a k-means++ start, Euclidean, separately in every head.

    Args:
        points:       [H, T, D] float, T >= 1; fewer distinct points than clusters leave some empty
        num_clusters: C >= 1
        seed:         equal seeds give equal clusters, whatever the device's own generator
        rounds:       assignments; empty clusters move to the farthest points in all but the last

    Beyond the points: one chunk in fp32 and a few [H, T] arrays. Mutates nothing.
    Raises: InvalidArgumentError if there are no points.
    """
    num_heads, num_points = points.shape[:2]
    if num_points == 0:
        raise InvalidArgumentError("k-means got 0 queries; it needs at least 1 token per head.")
    source = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_clusters, num_heads, 1, generator=source, dtype=torch.float64)
    centers = _spread_start(points, draws)
    for _ in range(rounds - 1):
        labels, distances = _assign(points, centers)
        sums, counts = _totals(points, labels, num_clusters)
        centers = _reseed(points, sums / counts.clamp_min(1)[..., None], counts, distances)
    labels, _ = _assign(points, centers)
    return _summary(points, labels, num_clusters)


def _chunks(points: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Tokens in fp32, a bounded number at a time: (which, [H, t, D])."""
    num_heads, num_points, dim = points.shape
    step = max(1, CHUNK_ELEMENTS // (num_heads * dim))
    for first in range(0, num_points, step):
        span = slice(first, first + step)
        yield span, points[:, span].float()


def _take(points: Tensor, index: Tensor) -> Tensor:
    """points [H, T, D] at index [H, N] -> [H, N, D] fp32."""
    return points.gather(1, index[..., None].expand(-1, -1, points.shape[-1])).float()


def _spread_start(points: Tensor, draws: Tensor) -> Tensor:
    """k-means++: each next centre is a point drawn in proportion to its squared distance from the
    nearest centre so far. draws: [C, H, 1] in [0, 1). Returns [H, C, D] fp32."""
    num_heads, num_points, _ = points.shape
    nearest = torch.ones(num_heads, num_points, device=points.device)
    centers: list[Tensor] = []
    for draw in draws:
        mass = nearest.double().cpu().cumsum(dim=1)  # on a GPU a running sum is not deterministic
        index = torch.searchsorted(mass, draw * mass[:, -1:], right=True).clamp_max(num_points - 1)
        centers.append(_take(points, index.to(points.device)))
        apart = torch.cat([(part - centers[-1]).square().sum(dim=-1) for _, part in _chunks(points)], dim=1)
        nearest = apart if len(centers) == 1 else torch.minimum(nearest, apart)
    return torch.cat(centers, dim=1)


def _assign(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest centre and squared distance to it, [H, T] each; ties go to the first centre."""
    lengths = centers.square().sum(dim=-1)[:, None]
    labels, distances = [], []
    for _, part in _chunks(points):
        apart = torch.baddbmm(lengths, part, centers.transpose(1, 2), alpha=-2)
        nearest = apart.min(dim=-1)
        labels.append(nearest.indices)
        distances.append(nearest.values + part.square().sum(dim=-1))
    return torch.cat(labels, dim=1), torch.cat(distances, dim=1).clamp_min(0)


def _totals(points: Tensor, labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Sums [H, C, D] and counts [H, C] of the members: a product with one-hot rows, which is
    deterministic where scattered additions are not."""
    sums = points.new_zeros(points.shape[0], num_clusters, points.shape[-1], dtype=torch.float32)
    counts = sums.new_zeros(sums.shape[:2])
    for span, part in _chunks(points):
        member = _members(labels[:, span], num_clusters)
        sums += member @ part
        counts += member.sum(dim=-1)
    return sums, counts


def _members(labels: Tensor, num_clusters: int) -> Tensor:
    """[H, t] -> one-hot [H, C, t] fp32."""
    clusters = torch.arange(num_clusters, device=labels.device)
    return (labels[:, None] == clusters[:, None]).float()


def _reseed(points: Tensor, centers: Tensor, counts: Tensor, distances: Tensor) -> Tensor:
    """Centres with the n-th empty cluster of a head moved to its n-th farthest point."""
    empty = counts == 0
    if not bool(empty.any()):
        return centers
    farthest = distances.topk(min(counts.shape[1], distances.shape[1]), dim=1).indices
    rank = (empty.long().cumsum(dim=1) - 1).clamp(0, farthest.shape[1] - 1)
    return torch.where(empty[..., None], _take(points, farthest.gather(1, rank)), centers)


def _summary(points: Tensor, labels: Tensor, num_clusters: int) -> Clusters:
    sums, counts = _totals(points, labels, num_clusters)
    centers = sums / counts.clamp_min(1)[..., None]
    squares = torch.zeros_like(sums)
    for span, part in _chunks(points):
        apart = part - _take(centers, labels[:, span])
        squares += _members(labels[:, span], num_clusters) @ apart.square()
    variances = squares / counts.clamp_min(1)[..., None]
    everyone = torch.arange(num_clusters, device=points.device).expand_as(counts)
    source = torch.where(counts > 0, everyone, counts.argmax(dim=1, keepdim=True))
    return Clusters(_take(centers, source), _take(variances, source), counts / points.shape[1])
