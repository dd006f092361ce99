"""Room behind what has been written goes back, in whole blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.memory import MemoryManager

from .sequences import find, fork, run, write

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
