"""LagKV: spread of a token relative to the next partition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView
from kvreclaim.options import option

_KEPT = 3.0


@dataclass(frozen=True)
class LagKV(CompressionPolicy):
    """Ranks tokens by their spread over the channels, measured with the range of the next partition.

    After the sinks the live tokens are cut into partitions P_0, P_1, ... of `lag` tokens. With low and
    high the least and the greatest entry per channel in P_{i+1}, a token x of P_i has

        spread(x) = std over channels of (x - low) / (high - low)
        score(x) = softmax over P_i of spread(key) + softmax over P_i of spread(value)

    and then its rank within P_i, so that every partition gives up the same share of its tokens. The
    last whole partition and the tokens after it have no next one: they stay, the newest first. A
    channel that is constant in the next partition counts as 0.

    Paper: arXiv 2504.04704.

    lag:   tokens per partition, 128 as published; a budget below sinks + 2 lag keeps recent tokens alone
    cross: False ranks within each partition, as published; True compares the scores of all partitions
    Cost: O(T D) per KV head and a copy of keys and values; no state.
    """

    lag: int = option(128, low=1, unit=" tokens")
    cross: bool = option(False)
    name = "lagkv"
    any_layers = True

    def score(self, view: LayerView) -> Tensor:
        num_kv_heads, num_tokens = view.source.shape
        start = view.candidates.start
        count = max(0, (num_tokens - start) // self.lag)
        slots = torch.arange(num_tokens, dtype=torch.float32, device=view.source.device)
        scores = (_KEPT + slots).repeat(num_kv_heads, 1)
        if count < 2:
            return scores
        end = start + count * self.lag
        parts = [x[:, start:end].float().unflatten(1, (count, self.lag)) for x in view.source.tensors()]
        ranked = sum(_spread(part).softmax(dim=-1) for part in parts)
        assert isinstance(ranked, Tensor)
        if not self.cross:
            ranked = ranked.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        scores[:, start : end - self.lag] = ranked.flatten(1)
        return scores


def _spread(parts: Tensor) -> Tensor:
    """Return the spread [K, P - 1, lag] fp32 of [K, P, lag, D]."""
    following = parts[:, 1:]
    low = following.amin(dim=2, keepdim=True)
    extent = following.amax(dim=2, keepdim=True) - low
    relative = (parts[:, :-1] - low).div_(extent.masked_fill(extent == 0, torch.inf))
    relative -= relative.mean(dim=-1, keepdim=True)
    return relative.square_().sum(dim=-1).div_(max(1, relative.shape[-1] - 1)).sqrt_()
