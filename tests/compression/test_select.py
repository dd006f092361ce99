"""Which slots stay, against sorting by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.policy import Mode
from kvreclaim.compression.select import ALWAYS, FREE, PROMPT, lowest_blocks, refuse_nan, select
from kvreclaim.errors import InvalidArgumentError

modes = st.sampled_from(list(Mode))


@st.composite
def cases(draw):
    """Few distinct scores, so that ties are common; eighths, so that sums are exact."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 12)))
    seed = draw(st.integers(0, 10_000))
    scores = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)) / 8
    if draw(st.booleans()):
        scores[scores == scores.min()] = -torch.inf
    tiers = np.array(draw(st.lists(st.integers(0, 2), min_size=shape[2], max_size=shape[2])))
    return scores, draw(st.integers(0, 14)), tiers


@st.composite
def protected(draw):
    """What a sequence has: sinks, a prompt that may be protected, recent tokens, in rows of any length."""
    num_tokens = draw(st.integers(1, 200))
    sinks, recent = draw(st.integers(0, 5)), draw(st.integers(0, 40))
    tiers = np.full(num_tokens, FREE)
    tiers[: draw(st.integers(0, num_tokens))] = draw(st.sampled_from([FREE, PROMPT]))
    tiers[:sinks] = ALWAYS
    tiers[max(0, num_tokens - recent) :] = ALWAYS
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scores = torch.randint(-999, 999, (2, 3, num_tokens), generator=seed) / 8
    return scores, draw(st.integers(0, num_tokens + 2)), tiers


def by_hand(row, budget, tiers):
    order = sorted(range(len(row)), key=lambda j: (-tiers[j], -row[j], j))
    return sorted(order[:budget])


@given(st.one_of(cases(), protected()), modes)
def test_equals_sorting_by_hand(case, mode):
    scores, budget, tiers = case
    kept = select(scores, budget, tiers, mode)
    if mode is Mode.UNION:
        shared = scores.flatten(0, 1).amax(0)[None, None]
    else:
        shared = scores.mean(0, keepdim=True) if mode is Mode.PER_HEAD else scores
    assert kept.dtype == torch.int64
    assert kept.shape == (*shared.shape[:2], min(budget, len(tiers)))
    for layer in range(shared.shape[0]):
        for head in range(shared.shape[1]):
            expected = by_hand(shared[layer, head].tolist(), budget, tiers.tolist())
            assert kept[layer, head].tolist() == expected


def test_ties_are_kept_in_order_in_long_rows():
    scores = (torch.arange(60_000) % 3).float()[None, None]
    kept = select(scores, 30_000, np.zeros(60_000, dtype=np.int64), Mode.PER_LAYER_HEAD)
    expected = [slot for slot in range(60_000) if slot % 3 == 2 or (slot % 3 == 1 and slot < 30_000)]
    assert kept[0, 0].tolist() == expected


@pytest.mark.parametrize("mode", list(Mode))
def test_nan_is_refused(mode):
    scores = torch.zeros(2, 2, 4)
    scores[1, 0, 2] = torch.nan
    with pytest.raises(InvalidArgumentError, match="NaN"):
        select(scores, 2, np.zeros(4, dtype=np.int64), mode)


@pytest.mark.parametrize("mode", list(Mode))
def test_nan_can_be_looked_for_later(mode):
    scores, found = torch.randn(2, 2, 9), []
    tiers = np.array([ALWAYS, *[FREE] * 7, ALWAYS])
    kept = select(scores, 5, tiers, mode, check=found.append)
    assert torch.equal(kept, select(scores, 5, tiers, mode))
    refuse_nan(found.pop())
    scores[1, 0, 4] = torch.nan
    for row in select(scores, 5, tiers, mode, check=found.append).flatten(0, 1).tolist():
        assert row == sorted(set(row))
        assert {0, 8} <= set(row) <= set(range(9))
    with pytest.raises(InvalidArgumentError, match="NaN"):
        refuse_nan(found.pop())


@pytest.mark.parametrize("extreme", [torch.inf, -torch.inf])
def test_infinite_scores_are_no_nan(extreme):
    scores = torch.tensor([[[torch.inf, 1.0, -torch.inf, extreme]]])
    select(scores, 2, np.zeros(4, dtype=np.int64), Mode.PER_LAYER_HEAD)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("tiers", [[2, 1, 1, 0, 0, 0, 2], [0, 2, 0, 1, 0, 2, 0]])
def test_no_number_of_the_scores_is_read(tiers, mode):
    """On a device without data, whatever had to wait for a result would fail."""
    scores = torch.empty(2, 3, 7, device="meta")
    kept = select(scores, 5, np.array(tiers), mode, check=lambda _: None)
    assert kept.device.type == "meta"
    assert kept.shape[-1] == 5


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


def test_blocks_with_nan_are_refused():
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
