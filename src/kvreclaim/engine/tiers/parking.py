"""What a sequence has besides its blocks, kept while it has none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.core.request import Sequence
from kvreclaim.engine.signals.signals import ParkedSignals, Signals
from kvreclaim.engine.ways.state import Cells, CompressionState
from kvreclaim.memory.tiers.manager import TieredMemory
from kvreclaim.ops.cells import blocks_of
from kvreclaim.ops.kv_cache import KVCache

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Aside:
    """Of one parked sequence.

    blocks:   ids of its table when it was parked, by which its cells name blocks
    open_row: keys [L, K, S, D] and values [L, K, S, Dv] of its last block, where that lies beside the pool
    """

    signals: ParkedSignals
    blocks: list[int | None]
    open_row: tuple[Tensor, Tensor] | None


class Parking:
    """Takes aside what parked sequences have, and gives it back. Blocks are moved by others."""

    def __init__(self, memory: TieredMemory, cache: KVCache, signals: Signals) -> None:
        self.memory, self.cache, self.signals = memory, cache, signals
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._aside: dict[int, Aside] = {}

    def park(self, seq: Sequence) -> None:
        """To be called before anything is moved or written for the step in which it was parked."""
        parked = self.memory.parked(seq.seq_id)
        row = None
        if self.cache.open is not None and parked.tail is not None:
            row = self.cache.open.copy_of(parked.tail)
        table = parked.table
        signals = self.signals.park(seq.seq_id, table.physical_len)
        self._aside[seq.seq_id] = Aside(signals, table.block_ids, row)
        seq.state = _moved(seq.state, HOST)
        seq.row_cache = seq.cell_cache = None

    def resume(self, seq: Sequence) -> None:
        """Its blocks are there again, under other ids; their bytes may still be on their way."""
        aside, table = self._aside.pop(seq.seq_id), self.memory.table(seq.seq_id)
        self.signals.resume(seq.seq_id, aside.signals)
        seq.state = _moved(seq.state, self.cache.device)
        seq.row_cache = seq.cell_cache = None
        if seq.state.cells is not None:
            seq.state.cells = _renamed(seq.state.cells, aside.blocks, table.block_ids, self.cache)
        tail = table.begun(self.memory.block_size)
        if aside.open_row is not None and tail is not None:
            self._rows[tail] = aside.open_row

    def fill_rows(self) -> None:
        """Of the open blocks of those that are back. To be called when rows that nobody needs are free."""
        rows, self._rows = self._rows, {}
        for block, row in rows.items():
            assert self.cache.open is not None, "only a cache with open blocks has given rows"
            self.cache.open.put(block, *row)

    def drop(self, seq_id: int) -> None:
        self._aside.pop(seq_id, None)


def _moved(state: CompressionState, device: torch.device) -> CompressionState:
    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    return replace(state, evicted=there(state.evicted), slot_positions=there(state.slot_positions))


def _renamed(cells: Cells, old: list[int | None], new: list[int | None], cache: KVCache) -> Cells:
    """The same cells of other blocks."""
    names = np.zeros(cache.num_blocks, dtype=np.int64)
    for before, after in zip(old[: cells.num_blocks], new, strict=False):
        assert before is not None, "cells have no holes"
        assert after is not None, "cells have no holes"
        names[before] = after
    blocks = blocks_of(cache, cells.table).astype(np.int64)
    table = cells.table + (names[blocks] - blocks) * cache.num_kv_heads
    return replace(cells, table=table.astype(np.int32))
