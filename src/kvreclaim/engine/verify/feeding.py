"""Tokens of full caches are copied behind what companions hold: exact keys and values, as the full cache has
them, in whatever place the companion has for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvreclaim.engine.core.request import Sequence
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.engine.ways.pages import block_row
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.kv_cache import LayerCache, PagedTokens


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """num_tokens of an owner's from `first` on, for which its companion has room behind what it holds."""

    owner: Sequence
    companion: Sequence
    first: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A cache and who knows what lies where in it."""

    memory: MemoryManager
    layers: tuple[LayerCache, ...]

    def slots(self, seq: Sequence, first: int, num_tokens: int) -> np.ndarray:
        """[num_tokens] int64: block * block_size + offset of these physical slots."""
        size, places = self.memory.block_size, np.arange(first, first + num_tokens)
        ids = block_row(seq, self.memory).astype(np.int64)
        return ids[places // size] * size + places % size


class Feeding:
    """Copies pieces, those of all sequences together: a gather and a write for each layer.

    A copy is decoded and coded again where the format codes: what a companion holds is a draft's business,
    and nothing that is answered depends on it.
    """

    def __init__(self, full: Store, compressed: Store, backend: Backend, signals: Signals) -> None:
        self.full, self.compressed, self.backend, self.signals = full, compressed, backend, signals

    @torch.inference_mode()
    def copy(self, pieces: list[Piece]) -> None:
        """Every owner's slots are its positions: nothing of a full cache is evicted."""
        size, device = self.full.memory.block_size, self.full.layers[0].cache.device
        source = np.concatenate([self.full.slots(p.owner, p.first, p.num_tokens) for p in pieces])
        target = np.concatenate(
            [
                self.compressed.slots(
                    p.companion, self.compressed.memory.table(p.companion.seq_id).physical_len, p.num_tokens
                )
                for p in pieces
            ]
        )
        blocks, places = np.unique(source // size, return_inverse=True)
        rows = torch.from_numpy(places * size + source % size).to(device)
        ids, mapping = torch.from_numpy(blocks).to(device), torch.from_numpy(target).to(device)
        for full, compressed in zip(self.full.layers, self.compressed.layers, strict=True):
            k, v = self.backend.gather_tokens(PagedTokens(full, ids, len(blocks) * size))
            k, v = (x[:, rows].transpose(0, 1).contiguous() for x in (k, v))
            dtype = compressed.cache.number
            self.backend.write_kv(compressed, k.to(dtype), v.to(dtype), mapping)
        if self.signals.scores is not None:
            self.signals.scores.copy_slots(torch.from_numpy(source).to(device), mapping)
