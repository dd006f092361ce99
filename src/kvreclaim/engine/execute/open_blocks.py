"""Which blocks are being filled, for formats that keep such blocks beside the pool (kivi4)."""

from __future__ import annotations

from kvreclaim.engine.core.scheduler import Scheduled
from kvreclaim.memory.manager import MemoryManager


def open_blocks(step: list[Scheduled], memory: MemoryManager) -> set[int]:
    """Those of all sequences, whether they take part in this pass or not: one that was computed alone, after
    a pass that failed, has not been committed yet. And those that the step copies, whose sequence may have
    been preempted since."""
    sources = (source for item in step for source, _ in item.growth.copies)
    return {*memory.unfilled(), *sources}
