from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import BlockKeys, BlockPool, BlockTable
from kvreclaim.memory.block_heap import BlockHeap
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.eviction.lru import FreeQueue
from kvreclaim.memory.prefix.index import BlockHash, BlockKey


def key(*blocks: list[int]) -> BlockKey:
    """Return the key of the last of these blocks."""
    return BlockKeys(BlockHash(2), [token for block in blocks for token in block])[len(blocks) - 1]


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


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_are_begun_one_after_another(block_size):
    expected = [0, *(1 + token // block_size for token in range(50))]
    assert [blocks_for(num_tokens, block_size) for num_tokens in range(51)] == expected
    assert blocks_for(-5 * block_size, block_size) == 0


def test_refuses_what_would_break_the_ring():
    queue = FreeQueue(2)
    with pytest.raises(AssertionError, match="block 1 is queued already"):
        queue.push_back(1)
    queue.remove(1)
    with pytest.raises(AssertionError, match="block 1 is not queued"):
        queue.remove(1)
    queue.remove(0)
    with pytest.raises(AssertionError, match="empty"):
        queue.pop_front()


@pytest.mark.parametrize("links", ["_next", "_prev"])
def test_check_sees_a_broken_link(links):
    queue = FreeQueue(4)
    getattr(queue, links)[1] = 3
    with pytest.raises(AssertionError):
        queue.check()


STEPS = st.lists(st.tuples(st.sampled_from(["push", "remove", "pop"]), st.integers(0, 9), st.integers(0, 5)))


@given(steps=STEPS)
def test_it_is_a_sorted_dict(steps):
    heap: BlockHeap[int] = BlockHeap()
    keys: dict[int, int] = {}
    for step, block, key in steps:
        smallest = min(((key, block) for block, key in keys.items()), default=None)
        assert heap.first() == smallest
        if step == "push":
            heap.push(block, key)
            keys[block] = key
        elif step == "remove" and block in keys:
            heap.remove(block)
            del keys[block]
        elif step == "pop" and smallest is not None:
            assert heap.pop() == smallest[1]
            del keys[smallest[1]]
        heap.check()
        assert len(heap) == len(keys)
        assert list(heap) == sorted(keys, key=lambda block: (keys[block], block))
        assert all((block in heap) == (block in keys) for block in range(10))
        assert all(heap.key(block) == key for block, key in keys.items())


def test_what_is_popped_leaves_no_more_dead_items_than_allowed():
    """Few blocks change their keys often, then the smallest keys leave: the dead items lie behind them."""
    heap: BlockHeap[int] = BlockHeap()
    for block in range(50):
        heap.push(block, block)
    for key in range(100, 210):
        heap.push(49, key)
    for block in range(49):
        assert heap.pop() == block
        heap.check()


KEYS = BlockKeys(BlockHash(4), [])


def table_of(blocks: list[int], length: int) -> BlockTable:
    table = BlockTable(KEYS, None)
    table.append(blocks)
    table.advance(length)
    return table


def test_every_change_of_the_blocks_has_a_version():
    table = table_of([4, 2, 7], 11)
    versions = [table.version]
    for change in (
        lambda: table.append([1]),
        lambda: table.replace(2, 9),
        lambda: table.release_out_of_window(1),
        lambda: table.drop([1], 2),
        lambda: table.shrink((2,), 3),
    ):
        change()
        versions.append(table.version)
    assert versions == sorted(set(versions))
    table.advance(1)
    table.mark_inexact()
    assert table.version == versions[-1]


def test_holes_are_not_counted():
    table = table_of([4, 2, 7, 5, 3], 17)
    assert table.release_out_of_window(2) == [4, 2]
    assert table.block_ids == [None, None, 7, 5, 3]
    assert (table.num_blocks, table.fork(5, KEYS).num_blocks, table.exact) == (3, 3, True)
    with pytest.raises(AssertionError, match="a hole, or named twice"):
        table.drop([1], 4)
    table.shrink((5,), 4)
    assert table.num_blocks == 1


@pytest.mark.parametrize(("indices", "exact_len"), [([0], 2), ([1], 4), ([2], 6), ([0, 1, 2], 0)])
def test_what_is_left_of_the_exact_slots_stays_exact(indices, exact_len):
    table = table_of([4, 2, 7, 5], 6)
    table.mark_inexact()
    table.advance(8)
    table.drop(indices, 4)
    assert table.exact_len == exact_len


def test_a_drop_that_names_an_entry_twice_changes_nothing():
    table = table_of([4, 2, 7], 10)
    with pytest.raises(AssertionError, match="named twice"):
        table.drop([1, 1], 4)
    assert (table.block_ids, table.physical_len, table.exact) == ([4, 2, 7], 10, True)
