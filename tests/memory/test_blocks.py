from __future__ import annotations

import pytest

from kvreclaim.memory.blocks import blocks_for


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_are_begun_one_after_another(block_size):
    expected = [0, *(1 + token // block_size for token in range(50))]
    assert [blocks_for(num_tokens, block_size) for num_tokens in range(51)] == expected
    assert blocks_for(-5 * block_size, block_size) == 0
