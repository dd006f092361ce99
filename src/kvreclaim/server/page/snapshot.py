"""What the page is told, read in the engine's thread between two steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreclaim.engine.core.engine import Engine, StepResult
from kvreclaim.engine.core.request import Request
from kvreclaim.engine.serving.host import Host
from kvreclaim.engine.serving.pool_view import PoolView, pool_view
from kvreclaim.schedule import Pass


@dataclass(frozen=True, slots=True, eq=False)
class Compaction:
    """One compression of one sequence.

    blocks:        [n] int32 ids that left its block table
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


class Recorder:
    """Notes compactions as they happen, while somebody watches. Lives where the engine runs."""

    def __init__(self) -> None:
        self._compactions: list[Compaction] = []

    def added(self, engine: Engine, request: Request) -> None:
        """Nothing has happened to it yet."""

    def stepped(self, engine: Engine, result: StepResult) -> None:
        self._compactions += [_compaction(request, done) for request, done in result.passes]

    def ended(self, engine: Engine, request: Request) -> None:
        """What its passes did has been told."""

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


def begin(host: Host) -> None:
    """Compactions from here on count."""
    end(host)
    host.observers = (*host.observers, Recorder())


def take(host: Host) -> Snapshot:
    """The engine now, with the compactions since the last one."""
    recorder = next(each for each in host.observers if isinstance(each, Recorder))
    return recorder.take(host.engine)


def end(host: Host) -> None:
    """Nobody watches any more."""
    host.observers = tuple(each for each in host.observers if not isinstance(each, Recorder))


def _compaction(request: Request, done: Pass[int]) -> Compaction:
    before, after = np.unique(done.source_ids).astype(np.int32), np.unique(done.target_ids).astype(np.int32)
    return Compaction(
        request_id=request.request_id,
        blocks=np.setdiff1d(before, after, assume_unique=True),
        before=len(before),
        after=len(after),
        num_freed=done.blocks_freed,
        num_evicted=done.num_tokens - done.keep,
    )
