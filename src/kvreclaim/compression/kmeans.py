"""k-means over the queries of one layer, all heads at once, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError

CHUNK_ELEMENTS = 1 << 21  # fp32 elements of one chunk of queries: 8 MiB stays near the core


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
        seed:         equal seeds give equal clusters, independent of the device's generator
        rounds:       assignments; empty clusters move to the farthest points in all but the last

    Beyond the points: one chunk in fp32 and a few [H, T] arrays. Mutates nothing.
    Raises: InvalidArgumentError if there are no points.
    """
    num_heads, num_points = points.shape[:2]
    if num_points == 0:
        raise InvalidArgumentError("k-means got 0 queries; it needs at least 1 token per head.")
    lengths = torch.cat([part.square().sum(dim=-1) for _, part in _chunks(points)], dim=1)
    source = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_clusters, num_heads, 1, generator=source, dtype=torch.float64)
    centers = _spread_start(points, lengths, draws)
    for _ in range(rounds - 1):
        grouping = _group(points, lengths, centers)
        centers = _reseed(points, grouping)
    return _summary(points, _group(points, lengths, centers))


@dataclass(frozen=True, slots=True, eq=False)
class _Grouping:
    """labels and distances (squared): [H, T], the nearest centre; counts [H, C] and means [H, C, D] of
    the members, the mean of none being 0."""

    labels: Tensor
    distances: Tensor
    counts: Tensor
    means: Tensor


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


def _spread_start(points: Tensor, lengths: Tensor, draws: Tensor) -> Tensor:
    """k-means++: each next centre is a point drawn in proportion to its squared distance from the
    nearest centre so far. lengths: [H, T] |x|^2; draws: [C, H, 1] in [0, 1). Returns [H, C, D] fp32."""
    num_points = points.shape[1]
    nearest = torch.ones_like(lengths)
    centers: list[Tensor] = []
    for draw in draws:
        mass = nearest.double().cpu().cumsum(dim=1)  # on a GPU a running sum is not deterministic
        index = torch.searchsorted(mass, draw * mass[:, -1:], right=True).clamp_max(num_points - 1)
        centers.append(_take(points, index.to(points.device)))
        apart = torch.cat([_apart(part, centers[-1])[..., 0] for _, part in _chunks(points)], dim=1)
        apart = (apart + lengths).clamp_min(0)
        nearest = apart if len(centers) == 1 else torch.minimum(nearest, apart)
    return torch.cat(centers, dim=1)


def _apart(part: Tensor, centers: Tensor) -> Tensor:
    """Squared distances less |x|^2: [H, t, D], [H, C, D] -> [H, t, C]."""
    return torch.baddbmm(centers.square().sum(dim=-1)[:, None], part, centers.transpose(1, 2), alpha=-2)


def _group(points: Tensor, lengths: Tensor, centers: Tensor) -> _Grouping:
    """Each point to its nearest centre; ties go to the first. Sums are products with one-hot rows,
    which are deterministic where scattered additions are not."""
    labels, distances = torch.empty_like(lengths, dtype=torch.int64), torch.empty_like(lengths)
    sums, counts = torch.zeros_like(centers), torch.zeros_like(centers[..., 0])
    for span, part in _chunks(points):
        nearest = _apart(part, centers).min(dim=-1)
        labels[:, span] = nearest.indices
        distances[:, span] = (nearest.values + lengths[:, span]).clamp_min(0)
        members = _members(nearest.indices, centers.shape[1])
        sums += members @ part
        counts += members.sum(dim=-1)
    return _Grouping(labels, distances, counts, sums / counts.clamp_min(1)[..., None])


def _members(labels: Tensor, num_clusters: int) -> Tensor:
    """[H, t] -> one-hot [H, C, t] fp32."""
    clusters = torch.arange(num_clusters, device=labels.device)
    return (labels[:, None] == clusters[:, None]).float()


def _reseed(points: Tensor, grouping: _Grouping) -> Tensor:
    """Return the means, with the n-th empty cluster of a head moved to its n-th farthest point."""
    empty = grouping.counts == 0
    if not bool(empty.any()):
        return grouping.means
    farthest = grouping.distances.topk(min(empty.shape[1], points.shape[1]), dim=1).indices
    rank = (empty.long().cumsum(dim=1) - 1).clamp(0, farthest.shape[1] - 1)
    return torch.where(empty[..., None], _take(points, farthest.gather(1, rank)), grouping.means)


def _summary(points: Tensor, grouping: _Grouping) -> Clusters:
    counts, means = grouping.counts, grouping.means
    squares = torch.zeros_like(means)
    for span, part in _chunks(points):
        labels = grouping.labels[:, span]
        squares += _members(labels, counts.shape[1]) @ (part - _take(means, labels)).square()
    variances = squares / counts.clamp_min(1)[..., None]
    everyone = torch.arange(counts.shape[1], device=points.device).expand_as(counts)
    source = torch.where(counts > 0, everyone, counts.argmax(dim=1, keepdim=True))
    return Clusters(_take(means, source), _take(variances, source), counts / points.shape[1])
