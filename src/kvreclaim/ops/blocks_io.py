"""Blocks as bytes: copies from a cache into host memory and back, independent of the format.

A block's bytes are one run, plane after plane, in each [L, K, ...] as its back-end lays them out, so they are
good for a cache of the same back-end, format and shape only.

On a GPU the runs go through two buffers on the device. While a copy stream empties one, or fills it, the
blocks of the other are gathered or scattered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.link import CudaLanes, Lanes, StreamLink
from kvreclaim.ops.moving import to_device

MAX_BYTES = 1 << 26
"""Size of a buffer on the device, unless a block takes more."""


def bytes_per_block(planes: Sequence[Tensor]) -> int:
    """Bytes of a block in planes [L, B, ...], all layers together."""
    return sum(plane.nbytes // plane.shape[1] for plane in planes)


class BlockCopies:
    """Copies between the blocks of a device and slots [N, bytes_per_block] uint8 of the host.

    On a GPU, copies of pinned slots go on after the call; work that is queued later on the current stream
    sees the blocks with their new bytes. Before the host reads or writes slots, `wait`.
    """

    def __init__(self, device: torch.device, lanes: Lanes | None = None) -> None:
        self.device = device
        self.lanes = CudaLanes(device) if lanes is None and device.type == "cuda" else lanes
        self._buffers: list[Tensor] = []
        self._turns = itertools.cycle(range(StreamLink.num_buffers))

    def read(
        self, planes: Sequence[Tensor], blocks: Sequence[int], slots: Tensor, places: Sequence[int]
    ) -> None:
        """Copy blocks[i] of planes [L, B, ...] to slots[places[i]]; no place twice."""
        for first, last in _parts(planes, len(blocks)):
            index, some = to_device(np.asarray(blocks[first:last]), self.device), places[first:last]
            if self.lanes is None:
                _gather(planes, index, slots, torch.tensor(some))
                continue
            turn, rows = self._buffer(last - first, slots.shape[1])
            self.lanes.wait_copied(turn)
            _gather(planes, index, rows, slice(None))
            self.lanes.computed(turn)
            self._copy(turn, slots, some, rows, to_slots=True)

    def write(
        self, planes: Sequence[Tensor], slots: Tensor, places: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Copy slots[places[i]] to blocks[i]; no block twice."""
        for first, last in _parts(planes, len(blocks)):
            index, some = to_device(np.asarray(blocks[first:last]), self.device), places[first:last]
            if self.lanes is None:
                _scatter(planes, index, slots[torch.tensor(some)])
                continue
            turn, rows = self._buffer(last - first, slots.shape[1])
            self._copy(turn, slots, some, rows, to_slots=False)
            self.lanes.wait_copied(turn)
            _scatter(planes, index, rows)
            self.lanes.computed(turn)

    def wait(self) -> None:
        """Return when all copies are over."""
        for turn in range(len(self._buffers)):
            assert self.lanes is not None, "a CPU needs no buffers"
            self.lanes.free(turn)

    def _buffer(self, count: int, num_bytes: int) -> tuple[int, Tensor]:
        """Return the next buffer's number, and its first bytes as rows [count, num_bytes]."""
        assert self.lanes is not None, "a CPU needs no buffers"
        if not self._buffers or count * num_bytes > len(self._buffers[0]):
            self.wait()
            size = max(MAX_BYTES, num_bytes)
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=self.device)
                for _ in range(StreamLink.num_buffers)
            ]
            for turn in range(len(self._buffers)):
                self.lanes.computed(turn)  # what had this memory before is computed first
        turn = next(self._turns)
        return turn, self._buffers[turn][: count * num_bytes].view(count, num_bytes)

    def _copy(self, turn: int, slots: Tensor, places: Sequence[int], rows: Tensor, *, to_slots: bool) -> None:
        """Queue copies of slots[places[i]] to rows[i], or back, behind the work on this buffer."""
        assert self.lanes is not None, "a CPU needs no buffers"
        self.lanes.wait_computed(turn)
        with self.lanes.copying():
            for at, place, count in consecutive(places):
                pair = slots[place : place + count], rows[at : at + count]
                target, source = pair if to_slots else pair[::-1]
                target.copy_(source, non_blocking=slots.is_pinned())
        self.lanes.copied(turn)


def read_blocks(planes: Sequence[Tensor], blocks: Sequence[int]) -> Tensor:
    """Return the bytes [n, bytes_per_block] uint8 of blocks of planes [L, B, ...], on the host."""
    found = torch.empty((len(blocks), bytes_per_block(planes)), dtype=torch.uint8)
    copies = BlockCopies(planes[0].device)
    copies.read(planes, blocks, found, range(len(blocks)))
    copies.wait()
    return found


def write_blocks(planes: Sequence[Tensor], rows: Tensor, blocks: Sequence[int]) -> None:
    """Copy rows [n, bytes_per_block] uint8 of the host to as many blocks; no block twice."""
    copies = BlockCopies(planes[0].device)
    copies.write(planes, rows, range(len(blocks)), blocks)
    copies.wait()


def _gather(planes: Sequence[Tensor], index: Tensor, rows: Tensor, places: Tensor | slice) -> None:
    """Put the bytes of blocks `index` into rows[places]."""
    for plane, start, end in _spans(planes):
        own = plane.index_select(1, index).transpose(0, 1).contiguous()
        rows[places, start:end] = own.view(len(index), -1).view(torch.uint8)


def _scatter(planes: Sequence[Tensor], index: Tensor, rows: Tensor) -> None:
    """Put rows [n, bytes_per_block] into blocks `index`."""
    for plane, start, end in _spans(planes):
        found = rows[:, start:end].reshape(-1).view(plane.dtype)
        plane.index_copy_(1, index, found.view(len(index), len(plane), *plane.shape[2:]).transpose(0, 1))


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
