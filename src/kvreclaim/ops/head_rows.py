"""Rows of unequal length, one per (layer, KV head), behind one another in one tensor.

Lengths lie on the host, so no shape depends on a result of the device, and nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.moving import to_device


def spread(values: np.ndarray, counts: np.ndarray, device: torch.device) -> Tensor:
    """Repeat values[i] counts[i] times: [sum of counts] int64 on the device.

    values, counts: int64, of one shape
    """
    sent = to_device(np.stack([values.ravel(), counts.ravel()]), device)
    return sent[0].repeat_interleave(sent[1], output_size=int(counts.sum()))


def runs(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Tensor:
    """Indices of runs: starts[i], starts[i] + 1, ..., lengths[i] of them: [sum of lengths] int64.

    starts, lengths: int64, of one shape
    """
    ends = lengths.cumsum().reshape(lengths.shape)
    return spread(starts - ends + lengths, lengths, device).add_(
        torch.arange(int(lengths.sum()), device=device)
    )


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """Numbers of every head of a sequence. Iterating and indexing give views by layer and head.

    flat:   [sum of counts], row (0, 0) first, then (0, 1)
    counts: [L, K] int64, length of each row
    """

    flat: Tensor
    counts: np.ndarray

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> HeadRows:
        return cls(torch.empty(0, dtype=dtype, device=device), np.zeros(shape, dtype=np.int64))

    @property
    def starts(self) -> np.ndarray:
        """[L, K] int64, where each row begins."""
        return self.counts.cumsum().reshape(self.counts.shape) - self.counts

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[list[Tensor]]:
        rows = iter(self.flat.split(self.counts.ravel().tolist()))
        return ([next(rows) for _ in layer] for layer in self.counts)

    def __getitem__(self, layer: int) -> list[Tensor]:
        places = zip(self.starts[layer].tolist(), self.counts[layer].tolist(), strict=True)
        return [self.flat[start : start + count] for start, count in places]

    def take(self, slots: HeadRows) -> HeadRows:
        """Return the numbers at these slots of each row."""
        index = slots.flat + spread(self.starts, slots.counts, self.flat.device)
        return HeadRows(self.flat.index_select(0, index), slots.counts)

    def append(self, numbers: Tensor, starts: np.ndarray, counts: np.ndarray) -> HeadRows:
        """New rows, each of which goes on with a run of the numbers [n]; starts, counts: [L, K] int64."""
        pool = torch.cat([self.flat, numbers])
        starts = np.stack([self.starts, len(self.flat) + starts], axis=-1)
        index = runs(starts, np.stack([self.counts, counts], axis=-1), pool.device)
        return HeadRows(pool.index_select(0, index), self.counts + counts)
