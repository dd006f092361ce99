"""StreamingLLM: sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode
from kvreclaim.options import option


@dataclass(frozen=True)
class StreamingLLM(CompressionPolicy):
    """Keeps the first `sinks` and the last `budget - sinks` tokens: score = index of the token, or its
    position, where the view has positions.

    The sinks are protected by CompressionConfig.sinks (4, as published), not by the score.

    Paper: arXiv 2309.17453.

    positions: "original", the default: keys stay rotated to their tokens' positions in the text.
               "cache", as published: the key in slot i is rotated to i, and the next token's position is
               the number of tokens kept. Keys are rotated by the difference whenever they move, in
               fp32, and rounded to the cache's dtype at each pass.
    Cost: O(T), no state; with "cache" each pass also reads, rotates and writes the kept keys. All modes
    keep the same set; union stores it once.
    """

    positions: Literal["original", "cache"] = option("original")
    name = "streaming_llm"
    any_layers = True
    default_mode = Mode.UNION

    @property
    def cache_relative(self) -> bool:
        return self.positions == "cache"

    def score(self, view: LayerView) -> Tensor:
        num_kv_heads, num_tokens = view.source.shape
        if view.signals.positions is not None:
            return view.signals.positions.to(view.source.device, torch.float32)
        recency = torch.arange(num_tokens, dtype=torch.float32, device=view.source.device)
        return recency.expand(num_kv_heads, -1)
