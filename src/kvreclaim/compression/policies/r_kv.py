"""R-KV: importance and redundancy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvreclaim.compression.attention import over_group, window_attention, with_window
from kvreclaim.compression.policies.snapkv import MAX_KERNEL, MAX_WINDOW, check_odd, pool
from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal
from kvreclaim.ops.scoring import MAX_LOGITS
from kvreclaim.options import option

MAX_BLOCK = 1024
"""Memory grows with it, and whoever may send a request may name it."""


@dataclass(frozen=True)
class RKV(CompressionPolicy):
    """Keeps tokens with high attention and without newer tokens of a similar key.

        Z = weight I - (1 - weight) R
        I = max-pool_kernel(mean over the last w queries of softmax_j(s q.K)), tokens before the window
        R = softmax_j(mean over the other keys i of cos(K_i, K_j)), where a pair counts for nothing if
            j is the most recent of the keys with cos(K_i, K_j) > threshold

    so that the most recent of similar keys is exempt. The window's own tokens rank above all others.
    Cached, rotated keys are compared.

    Paper: arXiv 2505.24133 (weight is its lambda).

    weight:     of importance against redundancy; .1
    window:     observation window, tokens; 8
    kernel:     of the max-pooling over importance, odd; 7
    threshold:  cosine above which keys are similar; .5
    group:      over the query heads of a KV head, "max" or "mean"
    similarity: "full" compares all keys with each other, O(T^2 D) per KV head; "block" compares inside
                runs of `block` neighbouring tokens, O(T block D)
    block:      tokens of such a run; read only by similarity "block"
    Cost: see similarity; a band of MAX_LOGITS similarities in memory at a time; state: w queries per layer.
    """

    weight: float = option(0.1, low=0, high=1)
    window: int = option(8, low=1, high=MAX_WINDOW)
    kernel: int = option(7, low=1, high=MAX_KERNEL)
    threshold: float = option(0.5, low=0, high=1)
    group: Literal["mean", "max"] = option("max")
    similarity: Literal["full", "block"] = option("full")
    block: int = option(16, low=2, high=MAX_BLOCK)
    name = "r_kv"
    any_layers = True
    needs = frozenset({Signal.RECENT_QUERIES})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_odd("r_kv option 'kernel'", self.kernel)

    @property
    def query_window(self) -> int:
        return self.window

    def score(self, view: LayerView) -> Tensor:
        rows = over_group(window_attention(view), view.source.shape[0], self.group)
        size = min(rows.shape[1], rows.shape[2])
        before = rows.shape[2] - size
        importance = pool(rows[..., :before].mean(dim=1), self.kernel, "max")
        redundancy = self._similarity(view.keys.float()).softmax(dim=-1)[:, :before]
        return with_window(self.weight * importance - (1 - self.weight) * redundancy, size, bound=1.0)

    def _similarity(self, keys: Tensor) -> Tensor:
        """Return the mean cosine similarity [K, T] of each key to the others, or to those of its block."""
        heads, tokens, _ = keys.shape
        directions = F.normalize(keys, dim=-1)
        if self.similarity == "full":
            return summed_similarity(directions, self.threshold) / tokens
        runs = F.pad(directions, (0, 0, 0, -tokens % self.block)).unflatten(1, (-1, self.block))
        sums = summed_similarity(runs.flatten(0, 1), self.threshold).view(heads, -1)[:, :tokens]
        start = torch.arange(tokens, device=keys.device) // self.block * self.block
        return sums / (tokens - start).clamp_max(self.block)


def summed_similarity(directions: Tensor, threshold: float) -> Tensor:
    """Sum each key's similarities to the others, exempting the most recent of similar keys.

    directions: [N, T, D], unit vectors or zero. Returns [N, T]. For each key i, the last key j != i with
    a cosine above the threshold is not charged with it. At most MAX_LOGITS cosines exist at a time.
    """
    batch, tokens, _ = directions.shape
    sums = directions.new_zeros(batch, tokens)
    columns = torch.arange(tokens, dtype=torch.int32, device=directions.device)
    for rows in columns.long().split(max(1, MAX_LOGITS // (batch * tokens))):
        cosine = directions[:, rows] @ directions.transpose(1, 2)
        cosine[:, rows - rows[0], rows] = 0.0
        last = torch.where(cosine > threshold, columns, -1).amax(dim=-1, keepdim=True)
        place = last.clamp_min(0).long()
        cosine.scatter_(-1, place, cosine.gather(-1, place).masked_fill(last >= 0, 0.0))
        sums += cosine.sum(dim=1)
    return sums
