from __future__ import annotations

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import BlockKeys, BlockPool
from kvreclaim.memory.prefix.keys import BlockHash, BlockKey


def key(*blocks: list[int]) -> BlockKey:
    """Of the last one of these blocks."""
    return BlockKeys(BlockHash(2), [token for block in blocks for token in block])[len(blocks) - 1]


def test_allocates_the_least_recently_used():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.release([2, 0]) == 2
    assert pool.allocate(3) == [3, 2, 0]
    assert (pool.num_free, pool.num_in_use, pool.peak_in_use) == (0, 4, 4)
    pool.check()


def test_a_shared_block_is_freed_by_its_last_holder():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.touch(block)
    assert pool.refs[block] == 2
    assert pool.release([block]) == 0
    assert pool.release([block]) == 1
    assert pool.refs[block] == 0


def test_a_cached_block_is_free_and_can_be_taken_back():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    entry = pool.enter(block, pool.index.root(None), key([7, 8]))
    assert entry is not None
    assert entry.block == block
    assert pool.num_cached == 0
    pool.release([block])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.touch(block)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert block in pool.index
    pool.check()


def test_reuse_forgets_what_was_cached():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.enter(block, pool.index.root(None), key([7, 8]))
    pool.release([block])
    assert pool.allocate(2) == [1, 0]
    assert (len(pool.index), pool.num_cached, pool.num_evictions) == (0, 0, 1)


def test_the_first_of_two_equal_blocks_stays_indexed():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    root = pool.index.root(None)
    first = pool.enter(a, root, key([7, 8]))
    assert first is not None
    assert pool.enter(b, root, key([7, 8])) is first
    assert b not in pool.index
    after = pool.enter(c, first, key([7, 8], [9, 9]))
    assert after is not None
    assert after.parent == first.serial


def test_nothing_is_indexed_after_a_parent_that_is_gone():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    parent = pool.enter(a, pool.index.root(None), key([7, 8]))
    assert parent is not None
    pool.unindex(a)
    assert pool.enter(b, parent, key([7, 8], [9, 9])) is None
    assert len(pool.index) == 0


def test_an_orphan_makes_way_for_its_recomputed_twin():
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    root, second = pool.index.root(None), key([1, 1], [2, 2])
    parent = pool.enter(a, root, key([1, 1]))
    assert parent is not None
    pool.enter(b, parent, second)
    pool.unindex(a)
    again = pool.enter(c, root, key([1, 1]))
    assert again is not None
    assert pool.index.find(again, second) is None
    assert pool.enter(d, again, second) is pool.index.find(again, second)
    assert b not in pool.index
    pool.check()


def test_clear_index_keeps_blocks_and_order():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.enter(blocks[0], pool.index.root(None), key([7, 8]))
    pool.release(blocks)
    pool.clear_index()
    assert (pool.num_cached, len(pool.index)) == (0, 0)
    assert list(pool.free_queue) == [2, 0, 1]
    pool.check()


def test_peak_is_measured_anew_after_a_reset():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.release(blocks[:2])
    assert pool.peak_in_use == 3
    pool.reset_peak()
    assert pool.peak_in_use == 1
    pool.touch(blocks[0])
    assert pool.peak_in_use == 2


def test_refuses_misuse():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="block 0 is released but not referenced"):
        pool.release([0])
    with pytest.raises(AssertionError, match="not in use"):
        pool.enter(0, pool.index.root(None), key([7, 8]))
    with pytest.raises(InvalidArgumentError, match="num_blocks is 0"):
        BlockPool(0)
