"""Cost in executed lines, not in time: the same work in a small pool and in one a thousand times as big."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from kvreclaim.memory import CompactionPlan, MemoryManager, Retention, eviction_orders

from .sequences import find


def lines(work: Callable[[], object]) -> int:
    """Lines of the memory room that the call executes; what a garbage collection runs is not counted."""
    executed = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable:
        nonlocal executed
        executed += event == "line" and frame.f_globals["__name__"].startswith("kvreclaim.memory")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return executed


def costs(num_blocks: int, order: str) -> list[int]:
    """Of every operation, on a sequence of eight blocks, of which three are pinned."""
    memory, prompt = MemoryManager(num_blocks, 4, eviction_policy=order), list(range(33))

    def admit(seq_id: int) -> None:
        memory.admit(seq_id, find(memory, prompt))

    return [
        lines(work)
        for work in (
            lambda: admit(0),
            lambda: memory.grow(0, 33),
            lambda: memory.commit(0, 33),
            lambda: memory.pin(0, [Retention(12, 60)]),
            lambda: memory.free(0),
            lambda: admit(1),
            lambda: (memory.grow(1, 1), memory.commit(1, 1)),
            lambda: memory.fork(1, 2, memory.table(1).keys.fork(prompt)),
            lambda: memory.grow(2, 5),
            lambda: memory.shrink(CompactionPlan(2, 9, (None, None, None))),
            lambda: memory.drop_blocks(1, [0, 3]),
            lambda: memory.free(1),
            lambda: memory.free(2),
            memory.stats,
        )
    ]


@pytest.mark.parametrize("order", eviction_orders())
def test_cost_does_not_depend_on_the_pool(order):
    """But for what a heap does inside, which is logarithmic."""
    assert costs(50, order) == costs(50_000, order)
