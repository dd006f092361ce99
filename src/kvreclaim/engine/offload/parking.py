"""State of a sequence besides its blocks, kept while it is parked."""

from __future__ import annotations

from torch import Tensor

from kvreclaim.engine.offload.image import HOST, SideState, moved, renamed
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.kv_cache import KVCache


class Parking:
    """Takes aside what parked sequences have, and gives it back. Blocks are moved by others."""

    def __init__(self, memory: MemoryManager, cache: KVCache, signals: Signals) -> None:
        self.memory, self.cache, self.signals = memory, cache, signals
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._aside: dict[int, SideState] = {}

    def park(self, seq: Sequence) -> None:
        """To be called before anything is moved or written for the step in which it was parked."""
        parked = self.memory.offload.parking.parked(seq.seq_id)
        row = None
        if self.cache.open is not None and parked.tail is not None:
            row = self.cache.open.copy_of(parked.tail)
        table = parked.table
        signals = self.signals.park(seq.seq_id, table.physical_len)
        self._aside[seq.seq_id] = SideState(signals, table.block_ids, row)
        seq.state = moved(seq.state, HOST)
        seq.row_cache = seq.cell_cache = None

    def enter(self, seq_id: int, aside: SideState) -> None:
        """Keep the state of a sequence that comes from elsewhere and lies on the host."""
        self._aside[seq_id] = aside

    def aside(self, seq_id: int) -> SideState:
        """The side state of a parked sequence."""
        return self._aside[seq_id]

    def resume(self, seq: Sequence) -> None:
        """Its blocks are there again, under other ids; their bytes may still be on their way."""
        aside, table = self._aside.pop(seq.seq_id), self.memory.table(seq.seq_id)
        self.signals.resume(seq.seq_id, aside.signals)
        seq.state = moved(seq.state, self.cache.device)
        seq.row_cache = seq.cell_cache = None
        if seq.state.cells is not None:
            seq.state.cells = renamed(seq.state.cells, aside.blocks, table.block_ids, self.cache)
        tail = table.begun(self.memory.block_size)
        if aside.open_row is not None and tail is not None:
            self._rows[tail] = aside.open_row

    def fill_rows(self) -> None:
        """Fill the rows of resumed sequences' open blocks. Call it when rows that nobody needs are free."""
        rows, self._rows = self._rows, {}
        for block, row in rows.items():
            assert self.cache.open is not None, "only a cache with open blocks has given rows"
            self.cache.open.put(block, *row)

    def drop(self, seq_id: int) -> None:
        self._aside.pop(seq_id, None)
