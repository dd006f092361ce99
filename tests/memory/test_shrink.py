from __future__ import annotations

import pytest

from kvreclaim.errors import UnknownRequestError
from kvreclaim.memory import CompactionPlan, MemoryManager

from .sequences import run


def private(length: int = 14, num_blocks: int = 10) -> MemoryManager:
    """Sequence 0 with four private blocks 0-3 of four slots, none of them indexed."""
    memory = MemoryManager(num_blocks, 4, enable_prefix_caching=False)
    run(memory, 0, range(length))
    return memory


def shared() -> MemoryManager:
    """Sequences 0 and 1 share the indexed blocks 0 and 1; 0 goes on with 2 and 3, 1 with 4."""
    memory = MemoryManager(10, 4)
    run(memory, 0, range(14))
    run(memory, 1, [*range(8), 99])
    assert memory.table(1).block_ids == [0, 1, 4]
    return memory


def seen(memory: MemoryManager, seq_id: int) -> tuple[list[int | None], int, object]:
    table = memory.table(seq_id)
    return table.block_ids.copy(), table.version, memory.table_state(seq_id).indexed


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (CompactionPlan(0, 15, (2, 3, None, None)), "15 slots planned, it has 14"),
        (CompactionPlan(0, -1, ()), "-1 slots planned"),
        (CompactionPlan(0, 5, (3,)), "1 targets for 5 slots, 2 needed"),
        (CompactionPlan(0, 4, (3, None)), "2 targets for 4 slots, 1 needed"),
        (CompactionPlan(0, 5, (3, 3)), "named twice"),
        (CompactionPlan(0, 4, (4,)), "target 4 is not its block"),
        (CompactionPlan(0, 4, (7,)), "target 7 is not its block"),
        (CompactionPlan(0, 4, (0,), strip=(0,)), "target 0 has 2 references, 1 allowed"),
        (CompactionPlan(0, 4, (2,)), "target 2 is indexed and not in strip"),
        (CompactionPlan(0, 4, (3,), strip=(2,)), "is not all in"),
        (CompactionPlan(0, 9, (None, None, None)), "3 fresh blocks wanted, 2 free"),
    ],
)
def test_a_plan_is_carried_out_whole_or_not_at_all(plan, message):
    memory = shared()
    run(memory, 2, range(70, 82))
    before = (memory.stats(), list(memory.pool.free_queue), list(memory.pool.refs))
    tables = [seen(memory, i) for i in (0, 1)]
    with pytest.raises(AssertionError, match=message):
        memory.shrink(plan)
    assert (memory.stats(), list(memory.pool.free_queue), list(memory.pool.refs)) == before
    assert tables == [seen(memory, i) for i in (0, 1)]
    assert memory.table(0).exact
    memory.check()


def test_an_unknown_sequence_is_refused():
    memory = private(16, num_blocks=5)
    with pytest.raises(UnknownRequestError, match="sequence 5"):
        memory.shrink(CompactionPlan(5, 0, ()))


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_only_full_blocks_are_dropped(index):
    memory = private(14)
    memory.grow(0, 4)
    with pytest.raises(AssertionError, match="is not one of 3 full blocks"):
        memory.drop_blocks(0, [0, index])
    assert memory.table(0).block_ids == [0, 1, 2, 3, 4]
    assert memory.table(0).exact
