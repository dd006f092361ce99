"""Copy tokens of full caches to the end of companions' caches: exact keys and values, in the companion's own
slots."""

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
    """num_tokens tokens of a target from `first` on. Its companion has room for them at its end."""

    target: Sequence
    companion: Sequence
    first: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class CompanionCache:
    """A cache with its memory manager. stream: set where the cache is in host memory."""

    memory: MemoryManager
    layers: tuple[LayerCache, ...]
    stream: StreamedLayers | None = None

    def slots(self, seq: Sequence, first: int, num_tokens: int) -> np.ndarray:
        """[num_tokens] int64: block * block_size + offset of these physical slots."""
        size, places = self.memory.block_size, np.arange(first, first + num_tokens)
        ids = seq.block_row(self.memory.table(seq.seq_id)).astype(np.int64)
        return ids[places // size] * size + places % size

    def next_slots(self, seq: Sequence, num_tokens: int) -> np.ndarray:
        """Return `slots` of the num_tokens tokens that follow the sequence's last one."""
        return self.slots(seq, self.memory.table(seq.seq_id).physical_len, num_tokens)

    def blocks(self, layer: int, ids: Tensor) -> tuple[LayerCache, Tensor]:
        """Return a layer that has these blocks [n] int64 on the device, and their ids there."""
        if self.stream is not None:
            return self.stream.blocks(layer, ids)
        return self.layers[layer], ids


class CompanionCopier:
    """Copies the ranges of all sequences together, with one gather and one write per layer.

    Coded formats are decoded and coded again. A companion's cache affects drafts only, so no answer depends
    on this loss.
    """

    def __init__(
        self, full: CompanionCache, compressed: CompanionCache, backend: Backend, signals: Signals
    ) -> None:
        self.full, self.compressed, self.backend, self.signals = full, compressed, backend, signals

    @torch.inference_mode()
    def copy(self, ranges: list[CopyRange]) -> None:
        """Copy the ranges. A target's slots are its positions, because a full cache evicts nothing."""
        size, device = self.full.memory.block_size, self.compressed.layers[0].cache.device
        source = np.concatenate([self.full.slots(p.target, p.first, p.num_tokens) for p in ranges])
        written = [self.compressed.next_slots(p.companion, p.num_tokens) for p in ranges]
        blocks, places = np.unique(source // size, return_inverse=True)
        rows = torch.from_numpy(places * size + source % size).to(device)
        ids, mapping = torch.from_numpy(blocks), torch.from_numpy(np.concatenate(written)).to(device)
        for n, compressed in enumerate(self.compressed.layers):
            full, device_ids = self.full.blocks(n, ids)
            k, v = self.backend.gather_tokens(PagedTokens(full, device_ids.to(device), len(blocks) * size))
            k, v = (x[:, rows].transpose(0, 1).contiguous() for x in (k, v))
            self.backend.write_kv(compressed, k, v, mapping)
        if self.signals.scores is not None:
            self.signals.scores.copy_slots(torch.from_numpy(source).to(device), mapping)
