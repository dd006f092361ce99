"""Tokens of full caches are copied behind what companions hold: exact keys and values, as the full cache has
them, in whatever place the companion has for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.kv_cache import LayerCache, PagedTokens
from kvreclaim.ops.streamed import StreamedLayers


@dataclass(frozen=True, slots=True, eq=False)
class CopyRange:
    """num_tokens of a target's from `first` on, for which its companion has room behind what it holds."""

    target: Sequence
    companion: Sequence
    first: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class CompanionCache:
    """A cache and who knows what lies where in it. stream: where it lies in host memory."""

    memory: MemoryManager
    layers: tuple[LayerCache, ...]
    stream: StreamedLayers | None = None

    def slots(self, seq: Sequence, first: int, num_tokens: int) -> np.ndarray:
        """[num_tokens] int64: block * block_size + offset of these physical slots."""
        size, places = self.memory.block_size, np.arange(first, first + num_tokens)
        ids = seq.block_row(self.memory.table(seq.seq_id)).astype(np.int64)
        return ids[places // size] * size + places % size

    def next_slots(self, seq: Sequence, num_tokens: int) -> np.ndarray:
        """The same behind what it holds."""
        return self.slots(seq, self.memory.table(seq.seq_id).physical_len, num_tokens)

    def blocks(self, layer: int, ids: Tensor) -> tuple[LayerCache, Tensor]:
        """A layer that has these blocks [n] int64 on the device, and their ids there."""
        if self.stream is not None:
            return self.stream.blocks(layer, ids)
        return self.layers[layer], ids


class CompanionCopier:
    """Copies pieces, those of all sequences together: a gather and a write for each layer.

    A copy is decoded and coded again where the format codes: what a companion holds is a draft's business,
    and nothing that is answered depends on it.
    """

    def __init__(
        self, full: CompanionCache, compressed: CompanionCache, backend: Backend, signals: Signals
    ) -> None:
        self.full, self.compressed, self.backend, self.signals = full, compressed, backend, signals

    @torch.inference_mode()
    def copy(self, pieces: list[CopyRange]) -> None:
        """Every target's slots are its positions: nothing of a full cache is evicted."""
        size, device = self.full.memory.block_size, self.compressed.layers[0].cache.device
        source = np.concatenate([self.full.slots(p.target, p.first, p.num_tokens) for p in pieces])
        written = [self.compressed.next_slots(p.companion, p.num_tokens) for p in pieces]
        blocks, places = np.unique(source // size, return_inverse=True)
        rows = torch.from_numpy(places * size + source % size).to(device)
        ids, mapping = torch.from_numpy(blocks), torch.from_numpy(np.concatenate(written)).to(device)
        for n, compressed in enumerate(self.compressed.layers):
            full, there = self.full.blocks(n, ids)
            k, v = self.backend.gather_tokens(PagedTokens(full, there.to(device), len(blocks) * size))
            k, v = (x[:, rows].transpose(0, 1).contiguous() for x in (k, v))
            self.backend.write_kv(compressed, k, v, mapping)
        if self.signals.scores is not None:
            self.signals.scores.copy_slots(torch.from_numpy(source).to(device), mapping)
