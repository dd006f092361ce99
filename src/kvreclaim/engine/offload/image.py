"""A sequence as one object: the bytes of its blocks and its state, from device or host; the state of parked
ones."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.request.compression_state import CompressionState
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.signals.signals import ParkedSignals, Signals
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.offload import Parked
from kvreclaim.memory.prefix.index import BlockKeys
from kvreclaim.offload.store.host import HostSlots
from kvreclaim.ops.blocks_io import read_blocks
from kvreclaim.ops.cell_tables import CellTable
from kvreclaim.ops.cells import blocks_of
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.schedule.budget.account import EvictionCounters

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class SideState:
    """The state of a sequence besides its blocks, on the host.

    blocks: ids of its table, by which its cells name blocks
    """

    signals: ParkedSignals
    blocks: list[int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A sequence on the host. Block ids are 0, 1, ... in the order of the table.

    blocks: [n, bytes_per_block] uint8 on the host; beside: scores per slot of the same blocks, if kept
    recurrent: [state_bytes] uint8: the state of recurrent layers, if the model has some
    """

    logical_len: int
    physical_len: int
    exact_len: int
    account: EvictionCounters
    state: CompressionState
    aside: SideState
    blocks: Tensor
    beside: Tensor | None
    recurrent: Tensor | None = None

    def table(self, keys: BlockKeys) -> BlockTable:
        """Return the block table of a sequence with these block ids."""
        return BlockTable.of_inexact(
            keys,
            self.aside.blocks,
            logical_len=self.logical_len,
            physical_len=self.physical_len,
            exact_len=self.exact_len,
        )


def image_of(seq: Sequence, memory: MemoryManager, cache: KVCache, signals: Signals) -> Image:
    """Copy a sequence on the device. It must not change meanwhile."""
    table = memory.table(seq.seq_id)
    ids = table.block_ids[: blocks_for(table.physical_len, memory.block_size)]
    held = [block for block in ids if block is not None]
    blocks = read_blocks(cache.planes, held)
    beside = None if signals.scores is None else read_blocks(signals.scores.planes, held)
    aside = SideState(signals.copy_of(seq.seq_id, table.physical_len), table.block_ids)
    return _image(seq, table, aside, cache, blocks, beside)


def image_of_parked(
    seq: Sequence, parked: Parked, aside: SideState, cache: KVCache, slots: HostSlots
) -> Image:
    """Copy a sequence on the host."""
    return _image(seq, parked.table, aside, cache, *slots.rows(parked.held))


def _image(
    seq: Sequence, table: BlockTable, aside: SideState, cache: KVCache, blocks: Tensor, beside: Tensor | None
) -> Image:
    used = aside.blocks[: blocks_for(table.physical_len, cache.block_size)]
    names: list[int | None] = list(range(len(used)))
    state = moved(seq.state, HOST)
    if state.cells is not None:
        state.cells = renamed(state.cells, used, names, cache)
    return Image(
        table.logical_len,
        table.physical_len,
        table.exact_len,
        seq.account,
        state,
        replace(aside, blocks=names),
        blocks,
        beside,
    )


def moved(state: CompressionState, device: torch.device) -> CompressionState:
    """Copy the state to a device."""

    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    return replace(state, slot_positions=there(state.slot_positions))


def renamed(
    cells: CellTable, old: ListLike[int | None], new: ListLike[int | None], cache: KVCache
) -> CellTable:
    """Return the cells with their blocks renamed, old ids to new."""
    names = np.zeros(cache.num_blocks, dtype=np.int64)
    for before, after in zip(old[: cells.num_blocks], new, strict=False):
        assert before is not None, "cells have no holes"
        assert after is not None, "cells have no holes"
        names[before] = after
    blocks = blocks_of(cache, cells.table).astype(np.int64)
    table = cells.table + (names[blocks] - blocks) * cache.num_kv_heads
    return replace(cells, table=table.astype(np.int32))


class Parking:
    """Keeps the side state of parked sequences, and restores it. Blocks are moved elsewhere."""

    def __init__(self, memory: MemoryManager, cache: KVCache, signals: Signals) -> None:
        self.memory, self.cache, self.signals = memory, cache, signals
        self._aside: dict[int, SideState] = {}

    def park(self, seq: Sequence) -> None:
        """Park a sequence. Call this before any block is moved or written in the step that parks it."""
        table = self.memory.offload.parking.parked(seq.seq_id).table
        signals = self.signals.park(seq.seq_id, table.physical_len)
        self._aside[seq.seq_id] = SideState(signals, table.block_ids)
        seq.state = moved(seq.state, HOST)
        seq.row_cache = seq.cell_cache = None

    def enter(self, seq_id: int, aside: SideState) -> None:
        """Keep the state of a loaded sequence on the host."""
        self._aside[seq_id] = aside

    def aside(self, seq_id: int) -> SideState:
        """Return the side state of a parked sequence."""
        return self._aside[seq_id]

    def resume(self, seq: Sequence) -> None:
        """Resume a sequence that has blocks again, under other ids. Their bytes may arrive later."""
        aside, table = self._aside.pop(seq.seq_id), self.memory.table(seq.seq_id)
        self.signals.resume(seq.seq_id, aside.signals)
        seq.state = moved(seq.state, self.cache.device)
        seq.row_cache = seq.cell_cache = None
        if seq.state.cells is not None:
            seq.state.cells = renamed(seq.state.cells, aside.blocks, table.block_ids, self.cache)

    def drop(self, seq_id: int) -> None:
        self._aside.pop(seq_id, None)
