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


@pytest.mark.parametrize("indices", [[0, 0], [1]])
def test_a_refused_punch_changes_nothing(indices):
    table = table_of([4, 2, 7], 10)
    table.punch([1])
    version = table.version
    with pytest.raises(AssertionError, match="a hole already, or named twice"):
        table.punch(indices)
    assert (table.block_ids, table.version) == ([4, None, 7], version)


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
