from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvreclaim.memory
from kvreclaim.memory import CompactionPlan, MemoryManager

from .sequences import find, fork, run, write


def private(length: int = 14) -> MemoryManager:
    """Sequence 0 with four private blocks 0-3 of four slots, none of them indexed."""
    memory = MemoryManager(10, 4, enable_prefix_caching=False)
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


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_only_full_blocks_are_dropped(index):
    memory = private(14)
    memory.grow(0, 4)
    with pytest.raises(AssertionError, match="is not one of 3 full blocks"):
        memory.drop_blocks(0, [0, index])
    assert memory.table(0).block_ids == [0, 1, 2, 3, 4]
    assert memory.table(0).exact


SIZE = 4


@given(st.integers(1, 14), st.integers(0, 20))
def test_only_blocks_with_tokens_stay(written, room):
    memory = MemoryManager(10, SIZE)
    run(memory, 0, range(written))
    before = memory.table(0).block_ids.copy()
    memory.grow(0, room)
    spare = len(memory.table(0).block_ids) - len(before)
    version = memory.table(0).version
    assert memory.trim(0) == spare
    table = memory.table(0)
    assert table.block_ids == before
    assert table.physical_len == table.logical_len == written
    assert (table.version > version) is (spare > 0)
    assert memory.trim(0) == 0
    memory.check()


def test_what_goes_back_is_free_and_what_stays_is_found():
    memory = MemoryManager(4, SIZE)
    run(memory, 0, range(8))
    memory.grow(0, 8)
    assert memory.num_free == 0
    memory.trim(0)
    assert memory.num_free == 2
    run(memory, 1, [*range(100, 108)])
    assert find(memory, [*range(8), 9]).num_tokens == 8


def test_a_fork_keeps_its_own_room():
    memory = MemoryManager(10, SIZE)
    run(memory, 0, range(8))
    fork(memory, 0, 1)
    memory.grow(0, 8)
    memory.grow(1, 4)
    held = memory.table(1).block_ids.copy()
    assert memory.trim(0) == 2
    assert memory.table(1).block_ids == held
    write(memory, 0, [50, 51])
    memory.check()


ROOM = Path(kvreclaim.memory.__file__).parent
OFF = {"pins.py", "groups/window.py", "windows.py"}


def files_of(work) -> set[str]:
    """Files of memory/ that run while `work` does."""
    found = set()

    def note(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOM):
            found.add(path.relative_to(ROOM).as_posix())

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_a_plain_prompt_runs_no_file_of_a_feature_that_is_off():
    memory = MemoryManager(8, 4)

    def serve():
        for seq_id in range(4):  # the later ones hit, and the pool is reused
            memory.admit(seq_id, memory.match_prefix(memory.keys([seq_id // 2] * 14)))
            while (length := memory.table(seq_id).logical_len) < 14:
                assert memory.can_grow(seq_id, 1)
                memory.grow(seq_id, 1)
                memory.commit(seq_id, 1)
                memory.release_copy_sources()
                assert memory.num_blocks(seq_id) == length // 4 + 1
            memory.free(seq_id)

    found = files_of(serve)
    assert {"manager.py", "groups/full.py", "pool.py"} <= found
    assert not found & OFF
