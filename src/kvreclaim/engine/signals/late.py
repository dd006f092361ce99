"""Signals of rows with drafts: recorded once verification has accepted them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.signals.store import MassStore, QueryStore
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.kv_cache import KVCache

SlotsAt = Callable[[int], SequenceSlots]
"""Number of accepted rows -> the sequence with the last one of them as its only query."""


@dataclass(frozen=True, slots=True, eq=False)
class LateRows:
    """Rows of one sequence in a step. first: position of the first one; rows: [n] int64, of the flat step;
    queries, mass: stores that record them, None for neither; slots: called when they are recorded."""

    seq_id: int
    first: int
    rows: Tensor
    queries: QueryStore | None
    mass: MassStore | None
    slots: SlotsAt


@dataclass(slots=True, eq=False)
class LateSignals:
    """Keeps the queries of such rows, layer by layer, until `record`. The recorded signals are bitwise equal
    to those of decoding the rows one after the other."""

    items: list[LateRows]
    cache: KVCache
    backend: Backend
    _seen: dict[int, Tensor] = field(default_factory=dict)

    def see(self, layers: slice, queries: Tensor) -> None:
        """Keep the queries [layers, T, H, D] of consecutive layers."""
        rows = queries[:, torch.cat([item.rows for item in self.items])]
        self._seen.update(zip(range(len(self.cache.layers))[layers], rows, strict=True))

    @torch.inference_mode()
    def record(self, num_accepted: Mapping[int, int]) -> None:
        """num_accepted: of each sequence that goes on, so many leading rows."""
        counts = [len(item.rows) for item in self.items]
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        stands = [num_accepted.get(item.seq_id, 0) for item in self.items]
        kept = list(zip(self.items, starts, stands, strict=True))
        for item, start, count in kept:
            if item.queries is not None and count:
                for layer, seen in self._seen.items():
                    item.queries.write(item.seq_id, layer, item.first, seen[start : start + count])
        for depth in range(max(count for _, _, count in kept)):
            self._record_mass([(item, start + depth) for item, start, n in kept if n > depth], depth)

    def _record_mass(self, items: list[tuple[LateRows, int]], depth: int) -> None:
        """One row of each sequence."""
        items = [(item, place) for item, place in items if item.mass is not None]
        if not items:
            return
        store = items[0][0].mass
        assert store is not None, "chosen by it"
        slots = tuple(item.slots(depth + 1) for item, _ in items)
        for item, _ in items:
            store.take(item.seq_id)
        store.reserve(max(each.seq_len for each in slots))
        rows, places = store.index([item.seq_id for item, _ in items]), [place for _, place in items]
        batch = AttentionBatch.build(slots, self.cache.block_size, self.cache.device)
        for layer, seen in self._seen.items():
            sums = self.backend.column_sums(seen[places], self.cache.layers[layer], batch)
            store.add(rows, layer, sums)
