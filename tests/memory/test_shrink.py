from __future__ import annotations

import pytest

from kvreclaim.errors import UnknownRequestError
from kvreclaim.memory import CompactionPlan, MemoryManager, Shrunk

from .sequences import find, fork, run, write


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


def test_private_blocks_are_filled_and_the_rest_goes_back():
    memory = private()
    assert memory.shrink(CompactionPlan(0, 5, (0, 1))) == Shrunk((0, 1), 2)
    table = memory.table(0)
    assert (table.block_ids, table.logical_len, table.physical_len) == ([0, 1], 14, 5)
    assert (table.num_evicted, table.exact) == (9, False)
    assert list(memory.pool.free_queue)[-2:] == [3, 2]
    assert memory.stats().blocks_freed_by_compression == 2
    memory.check()


@pytest.mark.parametrize("kept", range(15))
def test_blocks_freed_is_the_difference_of_the_ceilings(kept):
    memory = private()
    needed = -(-kept // 4)
    assert memory.shrink(CompactionPlan(0, kept, tuple(range(needed)))).blocks_freed == 4 - needed
    memory.check()


def test_room_that_was_not_written_goes_back_too():
    memory = private()
    memory.grow(0, 10)
    assert memory.shrink(CompactionPlan(0, 3, (5,))) == Shrunk((5,), 5)
    memory.check()


def test_shared_blocks_are_left_to_the_others():
    memory = shared()
    before = memory.table(1).block_ids.copy()
    shrunk = memory.shrink(CompactionPlan(0, 8, (None, None)))
    assert shrunk == Shrunk((5, 6), 0)
    assert memory.table(1).block_ids == before
    assert find(memory, range(9)).block_ids == (0, 1)
    assert memory.table_state(0).indexed == (False, False)
    memory.check()


def test_the_gain_comes_when_the_last_holder_lets_go():
    memory = MemoryManager(10, 4)
    run(memory, 0, range(8))
    fork(memory, 0, 1)
    assert memory.shrink(CompactionPlan(0, 4, (None,))).blocks_freed == -1
    assert memory.stats().blocks_freed_by_compression == -1
    assert memory.shrink(CompactionPlan(1, 4, (None,))).blocks_freed == 1
    assert memory.stats().blocks_freed_by_compression == 0


def test_an_indexed_block_is_stripped_before_it_is_a_target():
    memory = shared()
    assert memory.table_state(0).indexed == (True, True, True, False)
    shrunk = memory.shrink(CompactionPlan(0, 7, (3, 2), strip=(2,)))
    assert shrunk == Shrunk((3, 2), 0)
    assert memory.table_state(0).indexed == (False, False)
    assert find(memory, range(14)).block_ids == (0, 1)
    memory.check()


def test_all_kinds_of_targets_at_once():
    memory = shared()
    shrunk = memory.shrink(CompactionPlan(0, 12, (2, None, 3), strip=(2,)))
    assert shrunk == Shrunk((2, 5, 3), -1)
    memory.check()


def test_dropped_indexed_blocks_stay_cached():
    memory = MemoryManager(10, 4)
    run(memory, 0, range(14))
    memory.shrink(CompactionPlan(0, 4, (3,)))
    assert memory.stats().cached == 3
    assert find(memory, range(14)).block_ids == (0, 1, 2)
    memory.check()


def test_fresh_blocks_are_never_those_that_are_being_read():
    """The pool has one free block; the four that are released must not be it."""
    memory = private(16, num_blocks=5)
    assert memory.shrink(CompactionPlan(0, 4, (None,))).block_ids == (4,)


def test_a_compressed_sequence_grows_and_is_never_indexed():
    memory = shared()
    memory.shrink(CompactionPlan(0, 6, (3, 2), strip=(2,)))
    write(memory, 0, range(50, 60))
    table = memory.table(0)
    assert (table.physical_len, table.logical_len, table.num_evicted) == (16, 24, 8)
    assert memory.table_state(0).indexed == (False,) * 4
    assert memory.shrink(CompactionPlan(0, 16, tuple(table.block_ids))).blocks_freed == 0


def test_everything_may_be_evicted():
    memory = private()
    assert memory.shrink(CompactionPlan(0, 0, ())).blocks_freed == 4
    write(memory, 0, [1])
    assert (memory.table(0).physical_len, memory.table(0).logical_len) == (1, 15)


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


def test_punch_gives_whole_blocks_back_and_keeps_the_lengths():
    memory = private(14)
    assert memory.punch(0, [0, 2]) == 2
    table = memory.table(0)
    assert (table.block_ids, table.physical_len, table.logical_len) == ([None, 1, None, 3], 14, 14)
    assert list(memory.pool.free_queue)[-2:] == [2, 0]
    assert memory.table_state(0).ref_counts == (0, 1, 0, 1)
    assert memory.stats().blocks_freed_by_compression == 2
    write(memory, 0, range(6))
    assert memory.free(0) == 3
    memory.check()


def test_punch_leaves_a_shared_block_to_the_others():
    memory = shared()
    assert memory.punch(0, [0, 2]) == 1
    assert memory.table(1).block_ids == [0, 1, 4]
    assert find(memory, range(9)).num_tokens == 8
    assert memory.table_state(0).indexed == (False, True, False, False)
    assert not memory.table(0).exact
    memory.check()


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_only_full_blocks_are_punched(index):
    memory = private(14)
    memory.grow(0, 4)
    with pytest.raises(AssertionError, match="is not one of 3 full blocks"):
        memory.punch(0, [0, index])
    assert memory.table(0).block_ids == [0, 1, 2, 3, 4]
    assert memory.table(0).exact


def test_punched_tables_fork_and_shrink():
    memory = private(14)
    memory.punch(0, [1])
    fork(memory, 0, 1)
    assert memory.table(1).block_ids == [0, None, 2, 3]
    assert memory.shrink(CompactionPlan(1, 3, (None,))).blocks_freed == -1
    assert memory.shrink(CompactionPlan(0, 3, (2,))).blocks_freed == 2
    memory.check()


def test_dropped_blocks_go_back_and_later_ones_move_up():
    memory = private(14)
    assert memory.drop_blocks(0, [2, 0]) == 2
    table = memory.table(0)
    assert (table.block_ids, table.physical_len, table.logical_len) == ([1, 3], 6, 14)
    assert (table.num_evicted, table.exact) == (8, False)
    assert list(memory.pool.free_queue)[-2:] == [2, 0]
    assert memory.stats().blocks_freed_by_compression == 2
    memory.check()
    write(memory, 0, range(3))
    assert (table.block_ids, table.physical_len) == ([1, 3, 4], 9)
    assert memory.free(0) == 3
    memory.check()


def test_a_dropped_shared_block_stays_with_the_others_and_in_the_index():
    memory = shared()
    assert memory.drop_blocks(0, [0]) == 0
    assert memory.table(1).block_ids == [0, 1, 4]
    assert find(memory, range(9)).num_tokens == 8
    assert memory.table_state(0).indexed == (True, True, False)
    assert memory.table(0).exact_len == 10
    memory.check()
    write(memory, 0, range(6))
    assert memory.table_state(0).indexed == (True, True, False, False)


def test_a_dropped_private_block_that_is_indexed_stays_cached():
    memory = shared()
    assert memory.drop_blocks(0, [2]) == 1
    assert memory.stats().cached == 1
    assert find(memory, range(14)).block_ids == (0, 1, 2)
    memory.check()


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_only_full_blocks_are_dropped(index):
    memory = private(14)
    memory.grow(0, 4)
    with pytest.raises(AssertionError, match="is not one of 3 full blocks"):
        memory.drop_blocks(0, [0, index])
    assert memory.table(0).block_ids == [0, 1, 2, 3, 4]
    assert memory.table(0).exact


def test_dropped_tables_fork_and_a_shared_tail_is_copied():
    memory = private(14)
    memory.drop_blocks(0, [1])
    fork(memory, 0, 1)
    assert memory.table(1).block_ids == [0, 2, 3]
    assert memory.grow(1, 1).copies == ((3, 4),)
    memory.commit(1, 1)
    assert memory.drop_blocks(1, [0, 1]) == 0
    assert memory.table(1).block_ids == [4]
    memory.check()
