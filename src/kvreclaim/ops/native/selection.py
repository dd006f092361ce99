"""The best of each row of scores, without sorting."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.extension import native


def select_top(scores: Tensor, places: int) -> Tensor:
    """Return the indices of the `places` highest scores of each row.

    Args:
        scores: [R, N] fp32 on the CPU; -inf is allowed, NaN is not
        places: 0 <= places <= N

    Returns: [R, places] int64 ascending, the set that a stable descending sort puts first: of equal
        scores the lowest indices. Mutates nothing.
    Raises: InvalidArgumentError if a score is NaN; ValueError if places is above N.
    """
    kept = torch.empty((scores.shape[0], places), dtype=torch.int64)
    _select(scores.contiguous(), kept)
    return kept


def select_runs(scores: Tensor, starts: np.ndarray, lengths: np.ndarray, places: np.ndarray) -> Tensor:
    """reference.select_runs, run by run. Raises: InvalidArgumentError if a score is NaN."""
    kept, end = torch.empty(int(places.sum()), dtype=torch.int64), 0
    for start, length, count in zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True):
        own = kept[None, end : end + count]
        _select(scores[None, start : start + length], own)
        own += start
        end += count
    return kept


def _select(scores: Tensor, kept: Tensor) -> None:
    if native().select_top(scores, kept):
        raise InvalidArgumentError(
            "a score is NaN, so nothing can be ranked; check the policy, the statistics and the KV cache."
        )
