from __future__ import annotations

import pytest

from kvreclaim.memory import BlockKeys, BlockTable
from kvreclaim.memory.prefix.index import BlockHash

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
