"""Packing of evicted tokens into pages.

Their order is free: keys are rotated already, and a softmax is a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

POWER_ROUNDS = 4
CLUSTER_ROUNDS = 3


def order_of(kind: str, keys: Tensor, positions: Tensor, packed: Tensor, size: int) -> Tensor:
    """Order the packed tokens so that each run of `size`, from the first on, shares a page.

    Args:
        kind:      "time", "pca" or "kmeans" (schedule.recall.PACKINGS)
        keys:      [R, V, D] of rows; positions: [R, V]
        packed:    [R, V] bool, the tokens that are packed; the others come last

    Returns: [R, V] int64. Mutates nothing.
    """
    if kind == "time":
        return _sorted(positions.double(), packed)
    keys = keys.float().masked_fill(~packed[..., None], 0.0)
    count = packed.sum(-1).clamp(min=1)[:, None, None]
    keys = (keys - keys.sum(1, keepdim=True) / count).masked_fill(~packed[..., None], 0.0)
    along = principal(keys)
    if kind == "pca":
        return _sorted(along.double(), packed)
    return _clustered(keys, along, packed, size)


def principal(keys: Tensor) -> Tensor:
    """[R, V] projections of centred keys [R, V, D] on the direction in which they vary most, by power
    iteration; its sign is arbitrary."""
    start = keys.square().sum(1)  # [R, D]: never orthogonal to the answer unless there is none
    direction = start / start.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    for _ in range(POWER_ROUNDS):
        along = torch.einsum("rvd,rd->rv", keys, direction)
        direction = torch.einsum("rvd,rv->rd", keys, along)
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return torch.einsum("rvd,rd->rv", keys, direction)


def _sorted(by: Tensor, packed: Tensor) -> Tensor:
    return by.masked_fill(~packed, torch.inf).argsort(dim=-1, stable=True)


def _clustered(keys: Tensor, along: Tensor, packed: Tensor, size: int) -> Tensor:
    """Balanced Lloyd: clusters begin as pieces of the principal order; each round tokens are sorted by their
    nearest cluster and, within it, by distance, and cut into pieces of `size` again."""
    order, width = _sorted(along.double(), packed), keys.shape[1] // size * size
    if not width:
        return order
    for _ in range(CLUSTER_ROUNDS):
        members = keys.take_along_dim(order[:, :width, None], 1).unflatten(1, (-1, size))
        real = packed.take_along_dim(order[:, :width], 1).unflatten(1, (-1, size))
        count = real.sum(-1)
        centres = (members * real[..., None]).sum(2) / count.clamp(min=1)[..., None]
        distance = torch.cdist(keys, centres).masked_fill((count == 0)[:, None], torch.inf)
        near, cluster = distance.min(-1)
        span = near.masked_fill(~packed, 0.0).amax(-1, keepdim=True) * 2 + 1
        order = _sorted(cluster.double() * span.double() + near.double(), packed)
    return order
