from __future__ import annotations

import pytest

from kvreclaim.memory import BlockKeys, BlockTable
from kvreclaim.memory.prefix.keys import BlockHash

KEYS = BlockKeys(BlockHash(4), [])


def table_of(blocks: list[int], length: int) -> BlockTable:
    table = BlockTable(KEYS, None)
    table.append(blocks)
    table.advance(length)
    return table


def test_lengths_move_together_until_something_is_evicted():
    table = table_of([4, 2], 7)
    assert (table.logical_len, table.physical_len, table.num_evicted, table.exact_len) == (7, 7, 0, 7)
    table.shrink((2,), 3)
    assert (table.logical_len, table.physical_len, table.num_evicted, table.exact_len) == (7, 3, 4, 0)
    table.advance(1)
    assert (table.logical_len, table.physical_len, table.num_evicted, table.exact_len) == (8, 4, 4, 0)


def test_every_change_of_the_blocks_has_a_version():
    table = table_of([4, 2, 7], 11)
    versions = [table.version]
    for change in (
        lambda: table.append([1]),
        lambda: table.replace(2, 9),
        lambda: table.punch([0]),
        lambda: table.drop([1], 2),
        lambda: table.shrink((2,), 3),
    ):
        change()
        versions.append(table.version)
    assert versions == sorted(set(versions))
    table.advance(1)
    table.mark_inexact()
    assert table.version == versions[-1]


def test_what_was_computed_before_the_loss_stays_exact():
    table = table_of([4, 2], 5)
    table.mark_inexact()
    table.advance(2)
    table.mark_inexact()
    assert (table.exact, table.exact_len, table.physical_len) == (False, 5, 7)


def test_holes_keep_their_place():
    table = table_of([4, 2, 7], 10)
    assert table.punch([1, 0]) == [2, 4]
    assert table.block_ids == [None, None, 7]
    assert table.blocks() == [7]
    assert (table.logical_len, table.physical_len, table.exact) == (10, 10, False)


def test_holes_are_not_counted():
    table = table_of([4, 2, 7, 5, 3], 17)
    assert table.num_blocks == 5
    table.punch([0, 2])
    assert (table.num_blocks, table.fork(5, KEYS).num_blocks) == (3, 3)
    assert table.drop([0, 1], 4) == [2]
    assert (table.block_ids, table.num_blocks) == ([None, 5, 3], 2)
    table.append([8])
    assert table.num_blocks == 3
    table.shrink((5,), 4)
    assert table.num_blocks == 1


@pytest.mark.parametrize("indices", [[0, 0], [1]])
def test_a_refused_punch_changes_nothing(indices):
    table = table_of([4, 2, 7], 10)
    table.punch([1])
    version = table.version
    with pytest.raises(AssertionError, match="a hole already, or named twice"):
        table.punch(indices)
    assert (table.block_ids, table.version) == ([4, None, 7], version)


def test_dropped_entries_close_up():
    table = table_of([4, 2, 7, 5], 14)
    assert table.drop([0, 2], 4) == [4, 7]
    assert table.block_ids == [2, 5]
    assert (table.logical_len, table.physical_len, table.exact, table.exact_len) == (14, 6, False, 6)


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


def test_a_fork_is_independent():
    parent = table_of([4, 2, 7], 7)
    keys = KEYS.fork([])
    child = parent.fork(2, keys)
    assert (child.block_ids, child.logical_len, child.physical_len, child.keys) == ([4, 2], 7, 7, keys)
    child.append([9])
    child.advance(1)
    assert (parent.block_ids, parent.logical_len, parent.keys) == ([4, 2, 7], 7, KEYS)
