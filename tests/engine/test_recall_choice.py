"""Which pages are back, in which blocks; rows of cold memory, counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.engine.compact.recall_choice import PATIENCE, best_pages, ranked
from kvreclaim.engine.compact.recall_cold import ColdPool


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(5, 12))
def test_the_best_pages_are_back_and_those_that_stay_do_not_move(seed, blocks, pages):
    draw = torch.Generator().manual_seed(seed)
    rank = torch.rand((2, 3, pages), generator=draw)
    hot = torch.rand((2, 3, pages), generator=draw).argsort(-1)[..., :blocks]
    stays = torch.rand((2, 3, blocks), generator=draw) < 0.7
    chosen, fresh = best_pages(rank, hot, stays)
    wanted = rank.topk(blocks, -1).indices
    assert torch.equal(chosen.sort(-1).values, wanted.sort(-1).values)
    assert torch.equal(chosen[~fresh], hot[~fresh])
    assert (stays | fresh).all()
    kept = stays & (hot[..., :, None] == wanted[..., None, :]).any(-1)
    assert torch.equal(~fresh, kept), "a page that is back still and among the best was moved"


def test_who_is_back_stays_unless_another_promises_more():
    benefit, tries = torch.tensor([1.0, 1.0 + PATIENCE / 2, 0.0]), torch.zeros(3, dtype=torch.int32)
    hot, stays = torch.tensor([0]), torch.tensor([True])
    assert best_pages(ranked(benefit, tries, hot, stays), hot, stays)[0].item() == 0
    benefit[1] = 1.0 + 2 * PATIENCE
    assert best_pages(ranked(benefit, tries, hot, stays), hot, stays)[0].item() == 1


def test_each_try_in_vain_halves_what_a_page_promises():
    rank = ranked(torch.zeros(3), torch.tensor([0, 1, 3]), torch.tensor([2]), torch.tensor([False]))
    assert rank.exp().tolist() == pytest.approx([1.0, 0.5, 0.125])


def test_rows_are_counted():
    pool = ColdPool(8, 80, pinned=False)
    rows = pool.take(6)
    pool.share(rows[:2])
    pool.give_back(rows)
    assert pool.num_free == 8
    assert pool.bytes_in_use == 16
    pool.check([rows[:2]])
    with pytest.raises(MemoryError, match="raise kv_recall_size"):
        pool.take(9)
    again = pool.take(8)
    assert not set(again.tolist()) & set(rows[:2].tolist())
    pool.check([rows[:2], again])
    with pytest.raises(AssertionError, match="differ from their holders"):
        pool.check([again])


def test_a_row_is_not_given_back_twice():
    pool = ColdPool(8, 80, pinned=False)
    rows = pool.take(1)
    pool.give_back(rows)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(rows)
