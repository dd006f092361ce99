"""Random eviction: the control."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView
from kvreclaim.ops.moving import to_device
from kvreclaim.options import option


@dataclass(frozen=True)
class Random(CompressionPolicy):
    """Keeps tokens by chance: score uniform in [0, 1), drawn anew for every layer, KV head and pass.

        score = u(seed, layer, head, logical length, slot)

    A pure function of these: the same run makes the same choices, nothing reads or moves the global
    generator. It is the control: a useful policy must beat it.

    seed: of all draws; vary it for intervals
    Cost: O(T), no state.
    """

    seed: int = option(0, low=0)
    name = "random"

    def score(self, view: LayerView) -> Tensor:
        num_kv_heads, num_tokens = view.source.shape
        heads = range(view.first_head, view.first_head + num_kv_heads)
        draws = [torch.rand(num_tokens, generator=self._generator(view, head)) for head in heads]
        return to_device(torch.stack(draws), view.source.device)

    def _generator(self, view: LayerView, head: int) -> torch.Generator:
        text = f"{self.seed} {view.layer} {head} {view.logical_len}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
