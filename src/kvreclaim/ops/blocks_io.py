"""Blocks as bytes: copies from a cache into host memory and back, independent of the format.

A block's bytes are one run, plane after plane, in each [L, K, ...] as its back-end lays them out, so they are
good for a cache of the same back-end, format and shape only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.moving import move

MAX_BYTES = 1 << 26
"""In flight at once."""


def bytes_per_block(planes: Sequence[Tensor]) -> int:
    """Bytes of a block in planes [L, B, ...], all layers together."""
    return sum(plane.nbytes // plane.shape[1] for plane in planes)


def read_blocks(
    planes: Sequence[Tensor], blocks: Sequence[int], slots: Tensor, places: Sequence[int]
) -> None:
    """Copy blocks[i] of planes [L, B, ...] to slots[places[i]]; no place twice.

    slots: [N, bytes_per_block] uint8 on the host; pinned ones are copied at the speed of the bus
    """
    device = planes[0].device
    for first, last in _parts(planes, len(blocks)):
        index, some = move(np.asarray(blocks[first:last]), device), places[first:last]
        found = slots if device.type == "cpu" else _staging(planes, last - first)
        rows = torch.tensor(some) if found is slots else slice(None)
        for plane, start, end in _spans(planes):
            own = plane.index_select(1, index).transpose(0, 1).contiguous()
            found[rows, start:end] = own.view(last - first, -1).view(torch.uint8)
        if found is not slots:
            _copy_runs(slots, some, found, to_slots=True)


def write_blocks(
    planes: Sequence[Tensor], slots: Tensor, places: Sequence[int], blocks: Sequence[int]
) -> None:
    """Copy slots[places[i]] to blocks[i]; no block twice."""
    device = planes[0].device
    for first, last in _parts(planes, len(blocks)):
        index, some = move(np.asarray(blocks[first:last]), device), places[first:last]
        if device.type == "cpu":
            rows = slots[torch.tensor(some)]
        else:
            rows = _staging(planes, last - first)
            _copy_runs(slots, some, rows, to_slots=False)
        for plane, start, end in _spans(planes):
            found = rows[:, start:end].reshape(-1).view(plane.dtype)
            plane.index_copy_(
                1, index, found.view(last - first, len(plane), *plane.shape[2:]).transpose(0, 1)
            )


def _staging(planes: Sequence[Tensor], count: int) -> Tensor:
    """[count, bytes_per_block] uint8 on the device."""
    return torch.empty((count, bytes_per_block(planes)), dtype=torch.uint8, device=planes[0].device)


def _copy_runs(slots: Tensor, places: Sequence[int], rows: Tensor, *, to_slots: bool) -> None:
    """Copy slots[places[i]] to rows[i] on a GPU, or back. At return the bytes have arrived."""
    for at, place, count in consecutive(places):
        pair = slots[place : place + count], rows[at : at + count]
        target, source = pair if to_slots else pair[::-1]
        target.copy_(source, non_blocking=slots.is_pinned())
    torch.cuda.current_stream(rows.device).synchronize()


def consecutive(places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Index, place and length of each run of places that follow one another.

    >>> consecutive([4, 5, 6, 2, 3])
    [(0, 4, 3), (3, 2, 2)]
    """
    starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1] + 1]
    return [(i, places[i], end - i) for i, end in itertools.pairwise([*starts, len(places)])]


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
