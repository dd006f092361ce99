"""A forward pass over a cache in host memory: its layers are attended as they come, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.attend.paged import PagedKVBatch
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.windows import Place
from kvreclaim.model.attention import AttentionCall, LatentCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.streamed import StreamedBlocks, StreamedLayers

Watch = Callable[[AttentionCall], None]
PIECE_BYTES = 1 << 22
"""On a CPU: sequences are fetched and attended together up to here, so that attention finds what was fetched
in the processor's cache. Elsewhere a layer of all sequences is one piece."""


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The sequences of a piece.

    rows:  of the step's tokens, theirs; None: all
    batch: over the blocks of a buffer
    """

    rows: slice | Tensor | None
    batch: AttentionBatch


@dataclass(frozen=True, slots=True, eq=False)
class StreamedKVBatch:
    """Serves the attention layers of one forward pass from a cache in host memory (model.attention.KVBatch).

    places:   of every layer of the model
    attended: the sequences of each piece, in order
    watches:  see every call
    """

    ops: Backend
    stream: StreamedLayers
    places: tuple[Place, ...]
    attended: tuple[Attended, ...]
    watches: Sequence[Watch] = ()

    def attend_latent(self, call: LatentCall) -> Tensor:
        """[T, H, dv]: as of PagedKVBatch."""
        new = call.call
        if self.watches:
            self._see(call.absorbed())
        return self._each(
            new.layer,
            lambda batch, rows: batch.attend_latent(call if rows is None else call.part(rows)),
        )

    def attend(self, call: AttentionCall) -> Tensor:
        self._see(call)
        return self._each(
            call.layer, lambda batch, rows: batch.attend(call if rows is None else call.part(rows))
        )

    def _see(self, call: AttentionCall) -> None:
        for watch in self.watches:
            watch(call)

    def _each(self, layer: int, attend: Callable[[PagedKVBatch, slice | Tensor | None], Tensor]) -> Tensor:
        """The rows of all pieces of a layer."""
        out: Tensor | None = None
        num_rows = sum(len(each.batch.slot_mapping) for each in self.attended)
        for number, each in enumerate(self.attended):
            buffer = self.stream.layer(layer, number)
            paged = PagedKVBatch(self.ops, buffer[0].cache, buffer, self.places, (each.batch,))
            found = attend(paged, each.rows)
            self.stream.keep(layer, number, buffer)
            if each.rows is None:
                return found
            if out is None:
                out = found.new_empty((num_rows, *found.shape[1:]))
            out[each.rows] = found
        assert out is not None, "a step has sequences"
        return out


class StreamedBatches:
    """Makes the batches of steps. places: of every layer of the model; stream: holds the cache."""

    def __init__(
        self, ops: Backend, stream: StreamedLayers, places: tuple[Place, ...], device: torch.device
    ) -> None:
        self.ops, self.stream, self.places, self.device = ops, stream, places, device
        self._names = np.zeros(stream.host.num_blocks, dtype=np.int32)

    def begin(self, sequences: Sequence[SequenceSlots], watches: Sequence[Watch] = ()) -> StreamedKVBatch:
        """A batch for one pass; `stream.commit` or `stream.abandon` ends it."""
        size = self.stream.host.block_size
        starts = np.cumsum([0, *(seq.query_len for seq in sequences)])
        groups = self._groups(sequences)
        pieces, attended = [], []
        for members in groups:
            piece, slots = self._piece([sequences[i] for i in members])
            pieces.append(piece)
            rows = None if len(groups) == 1 else _rows(members, starts, self.device)
            attended.append(Attended(rows, AttentionBatch.build(slots, size, self.device)))
        self.stream.begin(pieces)
        return StreamedKVBatch(self.ops, self.stream, self.places, tuple(attended), watches)

    def _groups(self, sequences: Sequence[SequenceSlots]) -> list[list[int]]:
        """The sequences of each piece; those that begin with the same block, which they share, together."""
        if self.device.type != "cpu":
            return [list(range(len(sequences)))]
        alike: dict[int, list[int]] = {}
        for i, seq in enumerate(sequences):
            alike.setdefault(int(seq.block_ids[0]), []).append(i)
        groups: list[list[int]] = []
        num_bytes = PIECE_BYTES
        for members in alike.values():
            if num_bytes >= PIECE_BYTES:
                groups.append([])
                num_bytes = 0
            groups[-1] += members
            num_blocks = sum(len(sequences[i].block_ids) for i in members)
            num_bytes += num_blocks * self.stream.bytes_per_layer
        return [sorted(members) for members in groups]

    def _piece(self, sequences: list[SequenceSlots]) -> tuple[StreamedBlocks, tuple[SequenceSlots, ...]]:
        """Every block once, those that hold something first, and the sequences over the places of blocks."""
        size = self.stream.host.block_size
        spans = [
            (
                blocks_for(s.seq_len - s.query_len, size),
                (s.seq_len - s.query_len) // size,
                blocks_for(s.seq_len, size),
            )
            for s in sequences
        ]
        held = np.unique(
            np.concatenate([s.block_ids[:end] for s, (end, _, _) in zip(sequences, spans, strict=True)])
        )
        fresh = [s.block_ids[first:end] for s, (first, _, end) in zip(sequences, spans, strict=True)]
        ids = np.concatenate([held, *fresh])
        self._names[ids] = np.arange(len(ids), dtype=np.int32)
        written = [s.block_ids[first:end] for s, (_, first, end) in zip(sequences, spans, strict=True)]
        slots = tuple(
            replace(s, block_ids=self._names[s.block_ids[:end]])
            for s, (_, _, end) in zip(sequences, spans, strict=True)
        )
        return StreamedBlocks.of(ids, len(held), self._names[np.concatenate(written)]), slots


def _rows(members: list[int], starts: np.ndarray, device: torch.device) -> slice | Tensor:
    """The rows of these sequences among the step's tokens, in order."""
    if members[-1] - members[0] == len(members) - 1:
        return slice(int(starts[members[0]]), int(starts[members[-1] + 1]))
    parts = [np.arange(starts[i], starts[i + 1]) for i in members]
    return torch.from_numpy(np.concatenate(parts)).to(device)
