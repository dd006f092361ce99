"""The attention that each slot receives equals a softmax written out, whatever the shapes and neighbours."""

from __future__ import annotations

import pytest
import torch
from column_sums_oracle import Case, case, expected_sums, full_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import ALL_HOW, DTYPES, Ask, Shape, under, world

from kvreclaim.ops import reference

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def sums(w, layer: int = 0, **how) -> torch.Tensor:
    return reference.column_sums(
        w.q[layer], under(w.cache, layer, **{"scale": w.shape.dim**-0.5, **how}), w.batch
    )


def assert_sums(w, layer: int = 0, **how) -> None:
    got = sums(w, layer, **how)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected_sums(w, layer, **how), **CLOSE)


@DTYPES
@ALL_HOW
@pytest.mark.parametrize("which", list(Case))
def test_every_kind_of_softmax(how: dict, which: Case, dtype: torch.dtype) -> None:
    w = case(which, dtype)
    for layer in range(w.shape.layers):
        assert_sums(w, layer, **how)


@ALL_HOW
@pytest.mark.parametrize("num_scores", [1, 2000, 9000])
def test_cutting_long_query_ranges_changes_nothing(how: dict, num_scores: int, monkeypatch) -> None:
    w = case(Case.MOVED, torch.float32)
    whole = sums(w, **how)
    monkeypatch.setattr(reference.attention, "MAX_SCORES", num_scores)
    torch.testing.assert_close(sums(w, **how), whole, **CLOSE)


def test_a_row_that_sees_nothing_adds_nothing() -> None:
    shape = Shape()
    positions = torch.full((1, shape.kv_heads, 20), -100, dtype=torch.int32)
    positions[:, 1] = torch.arange(20)
    w = world(shape, [Ask(3, 20, slot_positions=positions)])
    got = sums(w, window=9)
    assert torch.equal(got[0, 0], torch.zeros(20))
    torch.testing.assert_close(got[0, 1].sum(), torch.tensor(3.0 * shape.group))


def test_nothing_is_mutated_and_no_sequence_gives_nothing() -> None:
    w = full_batch(torch.float32)
    before = [x.clone() for x in (w.q, w.cache.k, w.cache.v)]
    sums(w, window=7, softcap=2.0)
    for x, y in zip((w.q, w.cache.k, w.cache.v), before, strict=True):
        assert torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))
    empty = type(w.batch).build((), w.shape.block_size, w.q.device)
    assert reference.column_sums(w.q[0, :0], under(w.cache, 0, scale=1.0), empty).shape == (0, 2, 0)


@st.composite
def batches(draw):
    lengths = st.integers(1, 30).flatmap(
        lambda n: st.tuples(st.integers(0, n), st.just(n), st.integers(0, 2))
    )
    asks = [Ask(q, n, spare=spare) for q, n, spare in draw(st.lists(lengths, min_size=1, max_size=5))]
    shape = Shape(draw(st.integers(1, 3)), draw(st.integers(1, 3)), dim=8, block_size=draw(st.integers(1, 6)))
    return shape, asks, draw(st.integers(0, 99)), draw(st.none() | st.integers(1, 9))


@settings(max_examples=40, deadline=None)
@given(batches())
def test_any_block_tables(drawn) -> None:
    shape, asks, seed, window = drawn
    assert_sums(world(shape, asks, seed), window=window)
