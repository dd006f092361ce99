"""Sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode


@dataclass(frozen=True)
class StreamingLLM(CompressionPolicy):
    """Keeps the first `sinks` and the last `budget - sinks` tokens: score = index of the token.

    Paper: arXiv 2309.17453, with original positions (keys are never re-rotated). The sinks are
    protected by CompressionConfig.sinks (4, as published), not by the score.
    Cost: O(T), no state. All modes give the same set; union stores it once.
    """

    name = "streaming_llm"
    default_mode = Mode.UNION

    def score(self, view: LayerView) -> Tensor:
        num_kv_heads, num_tokens = view.source.shape
        recency = torch.arange(num_tokens, dtype=torch.float32, device=view.source.device)
        return recency.repeat(num_kv_heads, 1)
