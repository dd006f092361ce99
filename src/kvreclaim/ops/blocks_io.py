"""Blocks as bytes: out of a cache into host memory and back, the same bytes whatever they mean.

A block's bytes are one run, plane after plane, in each [L, K, ...] as its back-end lays them out, so they are
good for a cache of the same back-end, format and shape only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MAX_BYTES = 1 << 26
"""In flight at once."""


def bytes_per_block(planes: Sequence[Tensor]) -> int:
    """Bytes of a block in planes [L, B, ...], all layers together."""
    return sum(plane.nbytes // plane.shape[1] for plane in planes)


def read_blocks(
    planes: Sequence[Tensor], blocks: Sequence[int], slots: Tensor, places: Sequence[int]
) -> None:
    """Copy blocks[i] of planes [L, B, ...] to slots[places[i]]; no place twice.

    slots: [N, bytes_per_block] uint8 on the host
    """
    for first, last in _parts(planes, len(blocks)):
        index = torch.tensor(blocks[first:last], device=planes[0].device)
        rows = torch.tensor(places[first:last])
        for plane, start, end in _spans(planes):
            found = plane.index_select(1, index).transpose(0, 1).contiguous()
            slots[rows, start:end] = found.view(last - first, -1).view(torch.uint8).cpu()


def write_blocks(
    planes: Sequence[Tensor], slots: Tensor, places: Sequence[int], blocks: Sequence[int]
) -> None:
    """Copy slots[places[i]] to blocks[i]; no block twice."""
    for first, last in _parts(planes, len(blocks)):
        index = torch.tensor(blocks[first:last], device=planes[0].device)
        rows = slots[torch.tensor(places[first:last])]
        for plane, start, end in _spans(planes):
            found = rows[:, start:end].contiguous().to(plane.device).view(plane.dtype)
            plane.index_copy_(
                1, index, found.view(last - first, len(plane), *plane.shape[2:]).transpose(0, 1)
            )


def _parts(planes: Sequence[Tensor], count: int) -> Iterator[tuple[int, int]]:
    step = max(1, MAX_BYTES // bytes_per_block(planes))
    for first in range(0, count, step):
        yield first, min(first + step, count)


def _spans(planes: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    """Each plane, and where its part of a block's bytes begins and ends."""
    start = 0
    for plane in planes:
        end = start + plane.nbytes // plane.shape[1]
        yield plane, start, end
        start = end
