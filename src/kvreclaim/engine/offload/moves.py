"""Copies between blocks and host slots, planned by the memory and measured here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.offload import Move, OffloadSlots
from kvreclaim.offload.store.host import HostSlots
from kvreclaim.schedule.rates import Rates

PROBE_BYTES = 4 << 20


@dataclass(slots=True)
class MoveTotals:
    """Since the start. out: blocks of parked sequences; store: of prefixes; load: of both, to the pool."""

    out_bytes: int = 0
    out_s: float = 0.0
    load_bytes: int = 0
    load_s: float = 0.0
    store_bytes: int = 0
    store_s: float = 0.0
    failed_stores: int = 0


class Moves:
    """Copies between the blocks of a cache and slots of the host.

    On a GPU they go on beside the engine's thread, and the rates stay those measured at the start.
    """

    def __init__(self, offload: OffloadSlots, slots: HostSlots, signals: Signals, rates: Rates) -> None:
        self.offload, self.slots, self.signals, self.rates = offload, slots, signals, rates
        self.totals = MoveTotals()
        self.measures = slots.planes[0].device.type == "cpu"
        self._probe()

    def out(self, moves: Sequence[Move]) -> None:
        """Copy the blocks of parked sequences to slots. moves: (block, slot)"""
        started = time.perf_counter()
        moved = self.slots.read(moves, self._score_planes())
        spent = time.perf_counter() - started
        if self.measures:
            self.rates.note("out_s", spent, moved)
        self.totals.out_bytes += moved
        self.totals.out_s += spent

    def load(self, moves: Sequence[Move]) -> None:
        """Copy slots to blocks. moves: (slot, block)"""
        started = time.perf_counter()
        moved = self.slots.write(moves, self._score_planes())
        spent = time.perf_counter() - started
        if self.measures:
            self.rates.note("in_s", spent, moved)
        self.totals.load_bytes += moved
        self.totals.load_s += spent

    def store(self) -> None:
        """Copy blocks that have become full to their slots. Slots of a failed copy are forgotten."""
        moves = self.offload.pop_stores()
        if not moves:
            return
        started = time.perf_counter()
        try:
            self.totals.store_bytes += self.slots.read(moves, self._score_planes())
        except Exception:
            self.offload.forget_slots([slot for _, slot in moves])
            self.totals.failed_stores += len(moves)
            raise
        finally:
            self.totals.store_s += time.perf_counter() - started

    def _score_planes(self) -> tuple[Tensor, ...]:
        return () if self.signals.scores is None else self.signals.scores.planes

    def _probe(self) -> None:
        """Measure the cost of copies before the first one, out and back to the same blocks."""
        slots = self.slots
        most = min(len(slots.bytes), slots.planes[0].shape[1])
        same = [(i, i) for i in range(min(most, max(1, PROBE_BYTES // slots.bytes_per_slot)))]
        for _ in range(2 if same else 0):
            for name, copy in (("out_s", slots.read), ("in_s", slots.write)):
                started = time.perf_counter()
                moved = copy(same)
                slots.copies.wait()
                setattr(self.rates, name, (time.perf_counter() - started) / moved)
