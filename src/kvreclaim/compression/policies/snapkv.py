"""SnapKV: attention of the last queries, pooled over neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from kvreclaim.checks import require
from kvreclaim.compression.attention import over_group, window_attention, window_sums, with_window
from kvreclaim.compression.policy import CompressionPolicy, LayerView, Signal
from kvreclaim.options import option

MAX_WINDOW = 1024
MAX_KERNEL = 1023
"""Limits of options that a request may name: memory and time grow with them."""


@dataclass(frozen=True)
class SnapKV(CompressionPolicy):
    """Keeps the tokens that an observation window of the last queries attends to, and the window.

        A(j) = sum over the last w queries of softmax_j(s q.K), for tokens j before the window
        S(j) = pool_kernel(A)(j), then the mean over the query heads of the KV head

    The softmax runs over all live keys, causal inside the window. Pooling keeps the neighbours of an
    attended token; it is done at the first compression alone, as later neighbours were not adjacent
    in the text. The window's own tokens rank above all others.

    Paper: arXiv 2404.14469, which compresses the prompt once and keeps all that is generated.

    window:  observation window, tokens; 32 as published
    kernel:  of the pooling, odd; 5, of the published 5 and 7; 1 for none
    pooling: "average" (same padding with zeros, divisor = kernel) or "max"
    when:    "prefill": at the end of the prompt, as published; "always", the default, repeats it at
             every interval with the queries of the latest tokens, since a budget is to bound the
             cache of long answers too (the decode variant)
    group:   over the query heads of a KV head, "mean" or "max"; the paper has no such groups
    Cost: one product of [w, D] by [D, T] per query head; state: w queries per layer.
    """

    window: int = option(32, low=1, high=MAX_WINDOW)
    kernel: int = option(5, low=1, high=MAX_KERNEL)
    pooling: Literal["average", "max"] = option("average")
    when: Literal["prefill", "always"] = option("always")
    group: Literal["mean", "max"] = option("mean")
    name = "snapkv"
    any_layers = True
    needs = frozenset({Signal.RECENT_QUERIES})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_odd("snapkv option 'kernel'", self.kernel)

    @property
    def query_window(self) -> int:
        return self.window

    @property
    def prompt_only(self) -> bool:
        return self.when == "prefill"

    def score(self, view: LayerView) -> Tensor:
        return self.score_many([view])[0]

    def score_many(self, views: Sequence[LayerView]) -> list[Tensor]:
        """Score views together. If both steps average, query heads come first, which leaves less to pool."""
        if self.group == "mean" and self.pooling == "average":
            every = window_sums(views)
        else:
            every = [window_attention(view).sum(dim=1) for view in views]
        return [self._scores(view, sums) for view, sums in zip(views, every, strict=True)]

    def _scores(self, view: LayerView, sums: Tensor) -> Tensor:
        """Return the scores of column sums [H | K, T]."""
        assert view.signals.queries is not None, f"layer {view.layer}: no recent queries"
        num_kv_heads, num_tokens = view.source.shape
        size = min(view.signals.queries.shape[1], num_tokens)
        scores = sums[:, : num_tokens - size]
        if view.first:
            scores = pool(scores, self.kernel, self.pooling)
        return with_window(over_group(scores, num_kv_heads, self.group), size, bound=self.window)


def check_odd(name: str, value: int) -> None:
    """Check an odd kernel size. Raises: InvalidArgumentError."""
    require(value % 2 == 1, f"{name} is {value!r}; it must be odd.")


def pool(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """Pool scores [R, n] over kernel neighbours, same length; the average counts zeros beyond the ends."""
    if scores.shape[-1] == 0 or kernel == 1:
        return scores
    operation = F.max_pool1d if pooling == "max" else F.avg_pool1d
    return operation(scores, kernel, stride=1, padding=kernel // 2)
