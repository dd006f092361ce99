from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.select import ALWAYS, FREE, PROMPT, lowest_blocks
from kvreclaim.errors import InvalidArgumentError


def free(num_tokens: int) -> torch.Tensor:
    return np.full(num_tokens, FREE)


def test_a_partial_block_stays_whatever_its_score():
    scores = torch.tensor([[[5.0, 5, 5, 5, -9]]])
    assert lowest_blocks(scores, 3, free(5), 2) == [1]


def test_a_block_has_the_highest_tier_of_its_tokens():
    scores = torch.tensor([[[0.0, 0, 1, 1, 2, 2, 3, 3]]])
    tiers = np.array([ALWAYS, FREE, FREE, PROMPT, FREE, FREE, FREE, ALWAYS])
    assert lowest_blocks(scores, 6, tiers, 2) == [2]
    assert lowest_blocks(scores, 4, tiers, 2) == [1, 2]
    with pytest.raises(AssertionError, match="3 of 4 blocks must go, 2 may"):
        lowest_blocks(scores, 2, tiers, 2)


def test_tokens_out_of_every_window_do_not_count_and_a_block_of_them_goes_first():
    inf = math.inf
    scores = torch.tensor([[[-inf, -inf, -inf, 3.0, 2, 2, -5, -5]]])
    assert lowest_blocks(scores, 6, free(8), 2) == [0]
    assert lowest_blocks(scores, 4, free(8), 2) == [0, 3]
    assert lowest_blocks(scores, 2, free(8), 2) == [0, 2, 3]


def test_nan_is_refused():
    with pytest.raises(InvalidArgumentError, match="a score is NaN"):
        lowest_blocks(torch.tensor([[[1.0, math.nan]]]), 1, free(2), 1)


@given(
    num_tokens=st.integers(1, 40), size=st.integers(1, 6), share=st.floats(0.0, 1.0), seed=st.integers(0, 99)
)
def test_no_block_that_goes_outranks_one_that_stays(num_tokens, size, share, seed):
    scores = torch.randint(0, 4, (2, 1, num_tokens), generator=torch.Generator().manual_seed(seed)).float()
    budget = max(num_tokens % size, int(share * num_tokens))
    gone = lowest_blocks(scores, budget, free(num_tokens), size)
    assert num_tokens - len(gone) * size <= budget
    assert num_tokens - (len(gone) - 1) * size > budget or not gone
    full = num_tokens // size
    means = scores[..., : full * size].unflatten(-1, (full, size)).mean((0, 1, 3))
    stays = [block for block in range(full) if block not in gone]
    for low in gone:
        assert all((float(means[low]), -low) < (float(means[high]), -high) for high in stays)
