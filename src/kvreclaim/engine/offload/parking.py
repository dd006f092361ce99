"""State of a sequence besides its blocks, kept while it is parked."""

from __future__ import annotations

from kvreclaim.engine.offload.image import HOST, SideState, moved, renamed
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.kv_cache import KVCache


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
