"""Snapshots of the engine for the page, taken in its thread between two steps."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from kvreclaim.engine.request.request import Request
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.engine.serving.pool_view import pool_view, who_shares
from kvreclaim.engine.step.engine import Engine, StepResult
from kvreclaim.page.frames import Compaction, Snapshot, compaction_of


class CompactionRecorder:
    """Records compactions while there are viewers. Lives in the engine's process."""

    def __init__(self) -> None:
        self._compactions: list[Compaction] = []

    def added(self, engine: Engine, request: Request) -> None:
        """Do nothing: the request has no passes yet."""

    def stepped(self, engine: Engine, result: StepResult) -> None:
        self._compactions += [compaction_of(request.request_id, done) for request, done in result.passes]

    def ended(self, engine: Engine, request: Request) -> None:
        """Do nothing: the request's passes have been recorded."""

    def take(self, engine: Engine) -> Snapshot:
        """Return the engine's current state."""
        stats, totals = engine.memory.stats(), engine.totals
        done, self._compactions = self._compactions, []
        return Snapshot(
            at_s=time.monotonic(),
            view=pool_view(engine),
            sharing=who_shares(engine),
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
            tiers=tiers_of(engine, stats.prefix_hit_tokens),
            states=asdict(stats.states) if engine.memory.recurrent is not None else None,
            compactions=done,
        )


def tiers_of(engine: Engine, num_hit: int) -> dict[str, Any] | None:
    """Slots by state, hits in tokens by tier, and bytes moved since the start: down from the pool to host and
    disk, and up from there. num_hit: tokens found in any tier."""
    found = engine.tier_stats()
    if found is None:
        return None
    slots = {"host": found.host} | ({"disk": found.disk.slots} if found.disk is not None else {})
    host, disk = found.host_hit_tokens, found.disk_hit_tokens
    moves, counters = found.moves, found.disk.counters if found.disk is not None else None
    return {
        "slots": {name: [each.in_use, each.cached, each.free] for name, each in slots.items()},
        "hits": {"device": num_hit - host - disk, "host": host, "disk": disk},
        "down": {
            "host": moves.store_bytes + moves.out_bytes,
            "disk": counters.stored_bytes if counters is not None else 0,
        },
        "up": {
            "host": moves.load_bytes,
            "disk": counters.loaded_bytes if counters is not None else 0,
        },
        "parked": [found.parked_seqs, found.parked_slots],
        "deferred": found.deferred_seqs,
        "swaps": found.swaps,
    }


def begin(host: EngineCore) -> None:
    end(host)
    host.observers = (*host.observers, CompactionRecorder())


def take(host: EngineCore) -> Snapshot:
    """Return the engine's state, with the compactions since the last call."""
    recorder = next(each for each in host.observers if isinstance(each, CompactionRecorder))
    return recorder.take(host.engine)


def end(host: EngineCore) -> None:
    host.observers = tuple(each for each in host.observers if not isinstance(each, CompactionRecorder))
