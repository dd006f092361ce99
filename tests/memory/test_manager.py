from __future__ import annotations

import pytest

from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.memory import Growth, MemoryManager

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
    memory.refresh(match)
    assert list(memory.pool.free_queue) == [4, 5, 3, 2, 1, 0]
    assert memory.stats().in_use == 0
    assert find(memory, range(9)).block_ids == (0, 1)
    memory.check()


@pytest.mark.parametrize(("length", "hit"), [(0, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 12)])
def test_a_hit_is_whole_blocks_and_leaves_a_token(length, hit):
    memory = MemoryManager(8, 4)
    run(memory, 0, range(13))
    assert find(memory, range(length)).num_tokens == hit


@pytest.mark.parametrize(("max_tokens", "hit"), [(None, 12), (12, 12), (11, 8), (4, 4), (3, 0), (0, 0)])
def test_a_hit_is_bounded(max_tokens, hit):
    memory = MemoryManager(8, 4)
    run(memory, 0, range(13))
    assert find(memory, range(13), max_tokens=max_tokens).num_tokens == hit


def test_a_match_changes_nothing():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(13))
    memory.free(0)
    before = (memory.stats(), list(memory.pool.free_queue), list(memory.pool.refs))
    assert find(memory, range(13)).num_tokens == 12
    assert (memory.stats(), list(memory.pool.free_queue), list(memory.pool.refs)) == before


def test_salts_and_switch_decide_who_hits():
    memory = MemoryManager(16, 4)
    run(memory, 0, range(9), "a")
    assert [find(memory, range(9), salt=s).num_tokens for s in ("a", "b", "", None)] == [
        8,
        0,
        0,
        0,
    ]
    off = MemoryManager(16, 4, enable_prefix_caching=False)
    run(off, 0, range(9))
    assert find(off, range(9)).num_tokens == 0
    assert off.table_state(0).indexed == (False, False, False)
    assert (off.stats().prefix_query_tokens, off.stats().prefix_hit_tokens) == (9, 0)


def test_generated_tokens_are_hit_too():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(3))
    for token in range(3, 9):
        write(memory, 0, [token])
    assert find(memory, range(20)).num_tokens == 8


def test_a_queued_hit_is_not_free_any_more():
    memory = MemoryManager(4, 4)
    run(memory, 0, range(9))
    memory.free(0)
    match = find(memory, range(9))
    assert memory.stats().free + memory.stats().cached == 4
    assert memory.can_admit(match, 8)
    assert not memory.can_admit(match, 9)
    memory.admit(1, match)
    assert memory.can_grow(1, 8)
    assert not memory.can_grow(1, 9)


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


def test_a_forked_tail_is_copied_before_it_is_written():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(6))
    fork(memory, 0, 1)
    assert memory.table(1).block_ids == [0, 1]
    assert memory.table_state(1).ref_counts == (2, 2)
    token_list(memory.table(0).keys).append(6)
    with pytest.raises(AssertionError, match="wrote a shared block"):
        memory.commit(0, 1)
    assert memory.grow(0, 1) == Growth((), ((1, 2),))
    memory.commit(0, 1)
    assert (memory.table(0).block_ids, memory.table(1).block_ids) == ([0, 2], [0, 1])
    assert memory.grow(1, 3) == Growth((3,), ())
    assert memory.stats().cow_copies == 1
    memory.check()


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


def test_distrusted_blocks_are_found_by_nobody():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(8))
    run(memory, 1, [*range(4), 9, 9, 9, 9])
    memory.invalidate(1)
    assert find(memory, range(9)).num_tokens == 0
    memory.free(0)
    memory.free(1)
    assert memory.stats().cached == 1  # the second block of the first, which nothing leads to any more
    memory.check()


def test_a_copy_needs_a_block():
    memory = MemoryManager(2, 4)
    run(memory, 0, range(6))
    fork(memory, 0, 1)
    assert not memory.can_grow(1, 1)
    assert memory.can_grow(1, 0)
    memory.free(0)
    assert memory.can_grow(1, 1)


def test_a_fork_shares_no_room():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(4))
    memory.grow(0, 8)
    fork(memory, 0, 1)
    assert (memory.table(0).block_ids, memory.table(1).block_ids) == ([0, 1, 2], [0])
    memory.check()


def test_fork_and_evict_the_parent():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(6))
    fork(memory, 0, 1)
    assert memory.free(0) == 0
    write(memory, 1, [6, 7, 8])
    assert find(memory, [*range(9), 9]).num_tokens == 8


def test_of_two_equal_blocks_the_first_is_hit_and_the_chain_goes_on():
    memory = MemoryManager(8, 4)
    for seq_id in (0, 1):
        memory.admit(seq_id, find(memory, range(6)))
    for seq_id in (0, 1):
        write(memory, seq_id, range(6))
    assert (memory.table_state(0).indexed, memory.table_state(1).indexed) == ((True, False), (False, False))
    write(memory, 1, [6, 7])
    assert memory.table_state(1).indexed == (False, True)
    assert find(memory, range(9)).block_ids == (0, 3)


def test_nothing_is_indexed_after_a_loss():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(6))
    memory.mark_inexact(0)
    write(memory, 0, range(6, 16))
    assert memory.table_state(0).indexed == (True, False, False, False)
    assert memory.table(0).exact_len == 6
    fork(memory, 0, 1)
    write(memory, 1, range(16, 20))
    assert memory.table_state(1).indexed == (True, False, False, False, False)


def test_reset_ends_the_chains_of_running_sequences():
    memory = MemoryManager(10, 4)
    run(memory, 0, range(6))
    run(memory, 1, range(50, 53))
    memory.reset_prefix_cache()
    write(memory, 0, range(6, 9))
    write(memory, 1, range(53, 56))
    assert len(memory.pool.index) == 0
    assert memory.table(0).exact
    assert run(memory, 2, range(9)) == 0
    assert run(memory, 3, range(9)) == 8


def test_a_finished_prompt_is_cached_until_its_blocks_are_needed():
    memory = MemoryManager(4, 4)
    run(memory, 0, range(10))
    assert memory.free(0) == 3
    stats = memory.stats()
    assert (stats.free, stats.cached, stats.in_use, stats.peak_in_use) == (2, 2, 0, 3)
    assert run(memory, 1, range(50, 62)) == 0
    assert memory.stats().prefix_evictions == 1
    assert find(memory, range(10)).num_tokens == 4
    memory.free(1)
    memory.pool.reset_peak()
    assert memory.stats().peak_in_use == 0


def test_hits_are_counted_in_prompt_tokens():
    memory = MemoryManager(8, 4)
    run(memory, 0, range(10))
    run(memory, 1, range(10))
    stats = memory.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda memory: memory.table(9),
        lambda memory: memory.can_grow(9, 1),
        lambda memory: memory.grow(9, 1),
        lambda memory: memory.commit(9, 1),
        lambda memory: memory.fork(9, 10, memory.keys([])),
        lambda memory: memory.free(9),
        lambda memory: memory.punch(9, [0]),
        lambda memory: memory.mark_inexact(9),
        lambda memory: memory.table_state(9),
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
