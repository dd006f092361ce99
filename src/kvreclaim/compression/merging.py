"""Fewer clusters of queries: rare ones dropped, duplicates pooled."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.compression.kmeans import Clusters


def merge_clusters(clusters: Clusters, min_weight: float, min_distance: float) -> Clusters:
    """Drop clusters with few queries and pool clusters that lie close together, separately in every head.

    A cluster with a weight below min_weight is dropped; its weight is added to the nearest remaining one.
    Then, as long as two centres are closer than min_distance times the root mean square distance of
    the head's queries from their mean, the closest two become one: the mean of both and the variances
    about it, weighted. The heaviest cluster always stays.

    Args:
        min_weight:   share of the queries, in [0, 1]; 0 drops none
        min_distance: in spreads of the head, >= 0; 0 pools none

    Returns: the same shapes, heaviest first; places left over repeat the first, with weight 0.
    """
    heads = [
        _merge_head(*parts, min_weight, min_distance)
        for parts in zip(clusters.centers, clusters.variances, clusters.weights, strict=True)
    ]
    return Clusters(*(torch.stack(parts) for parts in zip(*heads, strict=True)))


def num_distinct(weights: Tensor) -> int:
    """Return the most clusters with members that any head has: weights [..., C]."""
    return int((weights > 0).sum(dim=-1).max())


def _merge_head(
    centers: Tensor, variances: Tensor, weights: Tensor, min_weight: float, min_distance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """centers and variances [C, D], weights [C] of one head; the same shapes again."""
    count = len(weights)
    kept = (weights > 0) & (weights >= min_weight)
    kept[weights.argmax()] = True
    nearest = torch.cdist(centers, centers[kept]).argmin(dim=1)
    weights = torch.zeros_like(weights[kept]).index_add(0, nearest, weights)
    mu, var = centers[kept], variances[kept]
    limit = min_distance * _spread(mu, var, weights)
    while len(weights) > 1:
        apart = torch.cdist(mu, mu).fill_diagonal_(torch.inf)
        first, second = divmod(int(apart.argmin()), len(weights))
        if not float(apart[first, second]) < limit:
            break
        mu, var, weights = _pool(mu, var, weights, (first, second))
    order = weights.argsort(descending=True, stable=True)
    order = torch.cat([order, order[:1].expand(count - len(order))])
    spare = torch.arange(count, device=weights.device) >= len(weights)
    return mu[order], var[order], weights[order].masked_fill(spare, 0.0)


def _spread(mu: Tensor, var: Tensor, weights: Tensor) -> float:
    """sqrt(E|q - E q|^2) of a mixture."""
    away = (mu - weights @ mu / weights.sum()).square() + var
    return float((weights @ away / weights.sum()).sum().sqrt())


def _pool(mu: Tensor, var: Tensor, weights: Tensor, pair: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two clusters of the pair as one, put last."""
    both = list(pair)
    share = weights[both] / weights[both].sum()
    mean = share @ mu[both]
    spread = share @ (var[both] + (mu[both] - mean).square())
    rest = [n for n in range(len(weights)) if n not in both]
    return (
        torch.cat([mu[rest], mean[None]]),
        torch.cat([var[rest], spread[None]]),
        torch.cat([weights[rest], weights[both].sum()[None]]),
    )
