"""What the page is told, read in the engine's thread between two steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreclaim.engine.core.engine import Engine, StepResult
from kvreclaim.engine.core.request import Request, Sequence
from kvreclaim.engine.face.pool_view import PoolView, pool_view
from kvreclaim.engine.ways.state import CompressionState

NO_BLOCKS: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Compaction:
    """One compression of one sequence.

    blocks:        [n] int32 ids that left its block table; empty where they are not known
    before, after: blocks that the sequence held
    num_evicted:   tokens per head
    """

    request_id: str
    blocks: NDArray[np.int32]
    before: int
    after: int
    num_freed: int
    num_evicted: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The engine at one moment; compactions are those since the last snapshot.

    totals: counters over the engine's life
    """

    at_s: float
    view: PoolView
    num_running: int
    num_waiting: int
    totals: dict[str, int]
    compactions: list[Compaction]


@dataclass(slots=True, eq=False)
class _Seen:
    """How far the compactions of a sequence have been told. A preempted sequence begins a new state."""

    state: CompressionState
    compactions: int = 0
    blocks_freed: int = 0
    num_evicted: int = 0


class Recorder:
    """Notes compactions as they happen, while somebody watches. Lives in the engine's thread."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._compactions: list[Compaction] = []

    def begin(self, engine: Engine) -> None:
        """Compactions from here on count."""
        self._compactions = []
        self._seen = {seq.seq_id: _now(seq) for seq in engine.scheduler.running}

    def added(self, engine: Engine, request: Request) -> None:
        """Nothing has happened to it yet."""

    def stepped(self, engine: Engine, result: StepResult) -> None:
        for seq in engine.scheduler.running:
            seen = self._seen.get(seq.seq_id)
            if seen is None or seen.state is not seq.state:
                seen = self._seen[seq.seq_id] = _Seen(seq.state, num_evicted=seq.state.inherited_evicted)
            if seq.state.compactions > seen.compactions:
                self._compactions.append(_compaction(engine, seq, seen))
                self._seen[seq.seq_id] = _now(seq)

    def ended(self, engine: Engine, request: Request) -> None:
        for seq in request.sequences:
            self._seen.pop(seq.seq_id, None)

    def take(self, engine: Engine) -> Snapshot:
        """The engine now."""
        stats, totals = engine.memory.stats(), engine.totals
        done, self._compactions = self._compactions, []
        return Snapshot(
            at_s=time.monotonic(),
            view=pool_view(engine),
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            totals={
                "prompt_tokens": totals.prompt_tokens,
                "generation_tokens": totals.generation_tokens,
                "tokens_evicted": totals.tokens_evicted,
                "compactions": totals.compactions,
                "prefix_query_tokens": stats.prefix_query_tokens,
                "prefix_hit_tokens": stats.prefix_hit_tokens,
                "blocks_freed": stats.blocks_freed_by_compression,
            },
            compactions=done,
        )


def _now(seq: Sequence) -> _Seen:
    state = seq.state
    return _Seen(state, state.compactions, state.blocks_freed, state.num_evicted)


def _compaction(engine: Engine, seq: Sequence, seen: _Seen) -> Compaction:
    table = engine.memory.table(seq.seq_id)
    after = np.array(table.blocks(), np.int32)
    blocks, num_freed = NO_BLOCKS, seq.state.blocks_freed - seen.blocks_freed
    before = len(after) + num_freed
    # The row that the step's kernels read is the table as it was before the pass, with what the step added.
    if seq.row_cache is not None and seq.row_cache[0] != table.version:
        row = np.unique(seq.row_cache[1])
        blocks, before = np.setdiff1d(row, after, assume_unique=True), len(row)
    return Compaction(
        request_id=seq.request.request_id,
        blocks=blocks,
        before=before,
        after=len(after),
        num_freed=num_freed,
        num_evicted=seq.state.num_evicted - seen.num_evicted,
    )
