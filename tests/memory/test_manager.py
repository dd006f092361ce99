from __future__ import annotations

import pytest

from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.memory import CompactionPlan, Growth, MemoryManager

from .sequences import find, fork, run, token_list, write


def test_golden_lru_trace():
    """policies.md: b = 4, 10 blocks, two prompts that share two blocks."""
    memory = MemoryManager(10, 4)
    assert run(memory, 0, range(18)) == 0
    assert run(memory, 1, [*range(8), *range(50, 57)]) == 8
    assert memory.table(0).block_ids == [0, 1, 2, 3, 4]
    assert memory.table(1).block_ids == [0, 1, 5, 6]
    memory.free(0)
    memory.free(1)
    assert list(memory.pool.free_queue) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    prompt = [*range(12), *range(100, 120)]
    match = find(memory, prompt)
    assert (match.block_ids, match.num_tokens) == ((0, 1, 2), 12)
    memory.admit(2, match)
    assert memory.grow(2, 20).new_blocks == (7, 8, 9, 4, 3)


def test_what_is_refreshed_is_reused_later():
    memory = MemoryManager(6, 4)
    for seq_id, tokens in enumerate((range(8), range(50, 58))):
        run(memory, seq_id, tokens)
        memory.free(seq_id)
    match = find(memory, range(9))
    assert match.block_ids == (0, 1)
    memory.prefix.refresh(match)
    assert list(memory.pool.free_queue) == [4, 5, 3, 2, 1, 0]
    assert memory.stats().in_use == 0
    assert find(memory, range(9)).block_ids == (0, 1)
    memory.check()


def test_what_only_idle_sequences_hold_is_not_in_use():
    """Two of them, one that shares blocks with what runs; hits and forks take blocks into use again."""
    memory = MemoryManager(10, 4)

    def counts():
        memory.check()
        stats = memory.stats()
        assert stats.in_use + stats.cached + stats.free == 10
        return stats.in_use, stats.cached

    run(memory, 0, range(10))
    fork(memory, 0, 1)
    memory.mark_idle(1)
    memory.mark_idle(1)
    assert counts() == (3, 0)
    memory.free(0)
    assert counts() == (0, 3)
    fork(memory, 1, 2)
    memory.mark_idle(2)
    fork(memory, 1, 3)
    assert counts() == (3, 0)
    write(memory, 3, range(50, 54))
    memory.release_copy_sources()
    assert counts() == (4, 1)
    memory.pool.reset_peak()
    assert run(memory, 4, [*range(8), 60]) == 8
    assert memory.stats().peak_in_use == 5
    memory.free(3)
    memory.free(4)
    assert counts() == (0, 4)
    memory.pool.reset_peak()
    assert run(memory, 5, [*range(8), 60]) == 8
    assert memory.stats().peak_in_use == 3
    memory.free(5)
    memory.free(1)
    assert counts() == (0, 4)
    memory.mark_active(2)
    assert counts() == (3, 1)
    memory.free(2)
    assert counts() == (0, 3)


def test_a_match_that_went_stale_is_not_admitted():
    memory = MemoryManager(3, 4)
    run(memory, 0, range(9))
    memory.free(0)
    match = find(memory, range(9))
    run(memory, 1, range(50, 62))
    with pytest.raises(AssertionError, match="block 0, number 0 of the match, was reused"):
        memory.admit(2, match)
    match = find(memory, range(50, 60))
    memory.reset_prefix_cache()
    with pytest.raises(AssertionError, match="was reused"):
        memory.admit(2, match)
    memory.check()


def test_growth_counts_from_what_is_written():
    memory = MemoryManager(8, 4)
    memory.admit(0, find(memory, range(5)))
    assert memory.grow(0, 5) == Growth((0, 1), ())
    assert memory.grow(0, 8) is memory.grow(0, 1)
    assert memory.table(0).physical_len == 0
    version = memory.table(0).version
    memory.commit(0, 5)
    assert memory.grow(0, 4) == Growth((2,), ())
    assert memory.table(0).version == version + 1


def test_a_full_pool_is_an_answer():
    memory = MemoryManager(2, 4)
    run(memory, 0, range(8))
    assert not memory.can_grow(0, 1)
    assert not memory.can_admit(find(memory, [9]), 1)
    assert memory.can_grow(0, 0)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        memory.grow(0, 1)
    memory.check()


def test_tokens_without_room_are_not_committed():
    memory = MemoryManager(2, 4)
    run(memory, 0, range(3))
    with pytest.raises(AssertionError, match="2 tokens written, room for 1"):
        memory.commit(0, 2)


def test_the_source_of_a_copy_is_not_handed_out_before_the_copy_is_made():
    memory = MemoryManager(3, 4)
    run(memory, 0, range(3))
    fork(memory, 0, 1)
    assert memory.grow(0, 1).copies == ((0, 1),)
    memory.free(1)
    assert (memory.pool.num_free, memory.stats().in_use) == (1, 2)
    memory.check()
    memory.release_copy_sources()
    assert memory.pool.num_free == 2
    memory.release_copy_sources()
    memory.check()


def test_a_held_source_is_still_written_in_place_by_its_last_sequence():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(3))
    fork(memory, 0, 1)
    fork(memory, 0, 2)
    assert [memory.grow(i, 1).copies for i in (0, 1, 2)] == [((0, 1),), ((0, 2),), ()]
    for seq_id in (0, 1, 2):
        token_list(memory.table(seq_id).keys).append(7 + seq_id)
        memory.commit(seq_id, 1)
    memory.release_copy_sources()
    memory.check()


def test_what_is_not_exact_is_never_found():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(8))
    token_list(memory.table(0).keys).extend(range(8, 16))
    for exact in (False, True):
        memory.grow(0, 4)
        memory.commit(0, 4, exact=exact)
    assert find(memory, range(17)).num_tokens == 8
    memory.check()


def test_distrusted_blocks_are_not_found():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(8))
    run(memory, 1, [*range(4), 9, 9, 9, 9])
    memory.invalidate(1)
    assert find(memory, range(9)).num_tokens == 0
    memory.free(0)
    memory.free(1)
    assert memory.stats().cached == 1  # the second block of the first, which nothing leads to any more
    memory.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda memory: memory.table(9),
        lambda memory: memory.can_grow(9, 1),
        lambda memory: memory.grow(9, 1),
        lambda memory: memory.commit(9, 1),
        lambda memory: memory.fork(9, 10, memory.keys([])),
        lambda memory: memory.free(9),
        lambda memory: memory.drop_blocks(9, [0]),
        lambda memory: memory.mark_inexact(9),
        lambda memory: memory.table_state(9),
        lambda memory: memory.shrink(CompactionPlan(9, 0, ())),
    ],
)
def test_an_unknown_sequence_is_named(call):
    memory = MemoryManager(8, 4)
    run(memory, 0, range(6))
    with pytest.raises(UnknownRequestError, match="sequence 9 holds no blocks; 1 sequences do"):
        call(memory)
    memory.check()


def test_an_id_names_one_sequence():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(6))
    with pytest.raises(InvalidArgumentError, match="sequence 0 exists already"):
        memory.admit(0, find(memory, [1]))
    with pytest.raises(InvalidArgumentError, match="sequence 0 exists already"):
        fork(memory, 0, 0)
    memory.free(0)
    run(memory, 0, range(6))


def test_sizes_are_checked():
    with pytest.raises(InvalidArgumentError, match="num_blocks is 0"):
        MemoryManager(0, 4)
    with pytest.raises(InvalidArgumentError, match="block_size is 0"):
        MemoryManager(4, 0)
