from __future__ import annotations

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import BlockKeys, BlockPool
from kvreclaim.memory.prefix.index import BlockHash, BlockKey


def key(*blocks: list[int]) -> BlockKey:
    """Of the last one of these blocks."""
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
