"""A KV cache in host memory. Its layers are copied to the device one after the other, through buffers.

What comes over is bytes of whole blocks, in large pieces: a piece is the blocks of some sequences of a
step, of one layer, and is read by one gather per plane, or by a few copies where the blocks lie in long runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.backend import Backend
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.link import DirectLink, HostLink, StreamLink

logger = logging.getLogger(__name__)

RUN_BYTES = 1 << 20
"""Runs of blocks of so many bytes, on average, are copied one by one; shorter ones are gathered."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamedBlocks:
    """Blocks of a step as they lie in a buffer, in this order.

    ids:      [n] int64 on the host, in the host cache; first those that hold tokens already
    num_held: of these, which are brought; the others hold nothing yet
    written:  [w] int64 on the host, places in `ids` of the blocks that get tokens in this step
    """

    ids: Tensor
    num_held: int
    written: Tensor

    @classmethod
    def of(cls, ids: np.ndarray, num_held: int, written: np.ndarray) -> StreamedBlocks:
        return cls(
            torch.from_numpy(ids.astype(np.int64)), num_held, torch.from_numpy(written.astype(np.int64))
        )


class StreamCounts(Protocol):
    """streamed_bytes: brought to the device; written_bytes: back to the host; stream_buffer_bytes: of all
    buffers"""

    streamed_bytes: int
    written_bytes: int
    stream_buffer_bytes: int


def host_cache(
    ops: Backend,
    layers: tuple[LayerFacts, ...],
    num_blocks: int,
    block_size: int,
    *,
    like: Tensor,
    kv_format: KVFormat,
) -> KVCache:
    """A cache in host memory, laid out as on the device of `like`; pinned where that is no CPU.

    Its bytes are those of a cache on the device, so that copies of whole blocks are all that it takes; on
    another device than a CPU no kernel of the back-end runs on it.
    """
    if like.device.type == "cpu":
        return ops.allocate(layers, num_blocks, block_size, like=like, kv_format=kv_format)
    one = ops.allocate(layers, 1, block_size, like=like, kv_format=kv_format)
    planes = tuple(
        torch.zeros((len(plane), num_blocks, *plane.shape[2:]), dtype=plane.dtype, pin_memory=True)
        for plane in one.planes
    )
    return KVCache(replace(one.shape, num_blocks=num_blocks), kv_format, planes, one.softmaxes)


class StreamedLayers:
    """The layers of a host cache, one after the other in buffers of the device.

    A step is `begin`, then `layer` for each layer and piece, in this order, with `keep` behind what writes to
    the layer, then `commit`, or `abandon` if it failed: the host cache is changed by `commit` alone.

    host:      the cache
    allocate:  blocks -> a cache of one layer of so many blocks on the device
    softmaxes: of the layers as they attend
    counts:    where bytes are counted
    """

    def __init__(
        self,
        ops: Backend,
        host: KVCache,
        allocate: Callable[[int], KVCache],
        layers: Sequence[LayerCache],
        counts: StreamCounts,
        link: HostLink | None = None,
    ) -> None:
        self.ops, self.host, self.counts = ops, host, counts
        self.bytes_per_layer = host.bytes_per_block // host.num_layers
        self._allocate = allocate
        self._softmaxes = [layer.softmax for layer in layers]
        device = allocate(1).device
        self._device_type = device.type
        if link is None:
            link = DirectLink() if device.type == "cpu" else StreamLink.on(device)
        self.link = link
        self.capacity = 0
        self._buffers: list[tuple[LayerCache, ...]] = []
        self._pieces: list[StreamedBlocks] = []
        self._order: list[tuple[int, int]] = []
        self._locals: list[Tensor] = []
        self._staged: list[Tensor] = []

    def blocks(self, layer: int, ids: Tensor) -> tuple[LayerCache, Tensor]:
        """Some blocks of a layer, between two steps, for kernels to read: a layer that has them, and their
        ids there. ids: [n] int64 on the host."""
        self.counts.streamed_bytes += len(ids) * self.bytes_per_layer
        if self.host.device.type == self._device_type:
            return self.host.layers[layer], ids
        found = self._allocate(len(ids))
        for plane, into in zip(self.host.planes, found.planes, strict=True):
            into[0].copy_(plane[layer].index_select(0, ids))
        return replace(found.layers[0], softmax=self._softmaxes[layer]), torch.arange(len(ids))

    def begin(self, pieces: list[StreamedBlocks]) -> None:
        """Make room for these pieces of all layers; what comes first is on its way then."""
        self._grow(max((len(piece.ids) for piece in pieces), default=0))
        self._pieces = pieces
        device = self._buffers[0][0].planes[0].device if self._buffers else self.host.device
        self._locals = [piece.written.to(device) for piece in pieces]
        total, pinned = sum(len(piece.written) for piece in pieces), device.type != "cpu"
        self._staged = [
            torch.empty((len(plane), total, *plane.shape[2:]), dtype=plane.dtype, pin_memory=pinned)
            for plane in self.host.planes
        ]
        self._order = [(layer, n) for layer in range(self.host.num_layers) for n in range(len(pieces))]
        self.link.begin(len(self._order), self._fetch)

    def layer(self, layer: int, piece: int) -> tuple[LayerCache, ...]:
        """A buffer that holds this piece of this layer: as each layer of the model attends over it.

        Raises: AssertionError if it is not the next one.
        """
        turn = layer * len(self._pieces) + piece
        return self._buffers[self.link.take(turn)]

    def keep(self, layer: int, piece: int, buffer: tuple[LayerCache, ...]) -> None:
        """Take what was written to this piece out of its buffer, for commit."""
        first = sum(len(each.written) for each in self._pieces[:piece])
        places = self._locals[piece]
        for plane, staged in zip(buffer[0].planes, self._staged, strict=True):
            target = staged[layer, first : first + len(places)]
            if plane.device.type == "cpu":
                torch.index_select(plane, 0, places, out=target)
            else:
                target.copy_(plane.index_select(0, places), non_blocking=True)

    def commit(self) -> None:
        """Put all that was kept into the host cache."""
        self.link.finish()
        ids = torch.cat([piece.ids[piece.written] for piece in self._pieces])
        for plane, staged in zip(self.host.planes, self._staged, strict=True):
            for own, new in zip(plane, staged, strict=True):
                own.index_copy_(0, ids, new)
        self.counts.written_bytes += len(ids) * self.bytes_per_layer * self.host.num_layers
        self.abandon()

    def abandon(self) -> None:
        """Forget a step."""
        self.link.cancel()
        self._pieces, self._order, self._locals, self._staged = [], [], [], []

    def _fetch(self, turn: int, buffer: int) -> None:
        """Bring the blocks of a turn that hold something."""
        layer, number = self._order[turn]
        piece, target = self._pieces[number], self._buffers[buffer][0]
        held = piece.ids[: piece.num_held]
        runs = _runs(held, RUN_BYTES // self.bytes_per_layer)
        for plane, into in zip(self.host.planes, target.planes, strict=True):
            own = plane[layer]
            if runs is None:
                self.link.gather(own, held, into[: len(held)], buffer)
                continue
            for first, start, count in runs:
                self.link.copy(own[first : first + count], into[start : start + count])
        if len(piece.ids) > piece.num_held:
            with self.link.copying():
                self.ops.prepare_blocks(target.cache, list(range(piece.num_held, len(piece.ids))))
        self.counts.streamed_bytes += piece.num_held * self.bytes_per_layer

    def _grow(self, num_blocks: int) -> None:
        """Buffers of at least so many blocks: of twice as many as before where they do not suffice."""
        if num_blocks <= self.capacity:
            return
        self.capacity = min(self.host.num_blocks, max(num_blocks, 2 * self.capacity))
        self._buffers.clear()
        for _ in range(self.link.num_buffers):
            (only,) = self._allocate(self.capacity).layers
            self._buffers.append(tuple(replace(only, softmax=softmax) for softmax in self._softmaxes))
        self.counts.stream_buffer_bytes = self.link.num_buffers * self.capacity * self.bytes_per_layer
        logger.info(
            "full cache in host memory: layers come through %d buffer(s) of %d blocks, %.1f MiB in all",
            self.link.num_buffers,
            self.capacity,
            self.counts.stream_buffer_bytes / 2**20,
        )


def _runs(ids: Tensor, least: int) -> list[tuple[int, int, int]] | None:
    """(first block, place, blocks) of each run of following ids; None if they are shorter than `least`."""
    found = ids.numpy()
    ends = np.flatnonzero(np.diff(found) != 1) + 1
    if (len(ends) + 1) * max(least, 1) > len(found):
        return None
    starts = [0, *ends.tolist()]
    return [
        (int(found[a]), a, b - a) for a, b in zip(starts, [*starts[1:], len(found)], strict=True) if b > a
    ]
