"""Attention over blocks equals attention written out, whatever the shapes, lengths and neighbours."""

from __future__ import annotations

import pytest
import torch
from column_sums_oracle import Case, case, random_positions
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import ALL_HOW, DTYPES, Ask, Shape, assert_equal, attend, expected, under, world

from kvreclaim.ops import reference

LENGTHS = {
    "decode": [(1, 1), (1, 2), (1, 15), (1, 16), (1, 17), (1, 300), (1, 33)],
    "prefill": [(1, 1), (3, 3), (15, 15), (16, 16), (17, 17), (40, 40)],
    "chunks": [(1, 40), (2, 17), (7, 8), (8, 24), (9, 33)],
    "mixed": [(1, 260), (20, 20), (1, 1), (6, 38), (1, 16), (2, 270)],
}


def asks(kind: str) -> list[Ask]:
    return [Ask(*lengths) for lengths in LENGTHS[kind]]


@DTYPES
@ALL_HOW
@pytest.mark.parametrize("kind", LENGTHS)
def test_every_kind_of_softmax(how: dict, kind: str, dtype: torch.dtype) -> None:
    w = world(Shape(dtype=dtype), asks(kind))
    out = attend(w, **how)
    assert out.dtype == dtype
    assert_equal(out, expected(w, **how))


@DTYPES
@ALL_HOW
def test_a_window_counts_logical_positions(how: dict, dtype: torch.dtype) -> None:
    """After a compaction every head holds other positions, and later slots lie at slot + shift."""
    w = case(Case.MOVED, dtype)
    for layer in (0, 1, 0):
        assert_equal(attend(w, layer, **how), expected(w, layer, **how))


def test_one_batch_serves_layers_with_and_without_a_window() -> None:
    shape = Shape(layers=3)
    w = world(shape, asks("mixed"))
    for layer, window in enumerate((None, 7, 16)):
        assert_equal(attend(w, layer, window=window), expected(w, layer, window=window))


@ALL_HOW
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_row_that_sees_nothing_is_zero(how: dict, query_len: int) -> None:
    shape = Shape()
    how = {**how, "window": 9}
    far = torch.full((1, shape.kv_heads, 20), -100, dtype=torch.int32)
    half = far.clone()
    half[:, 1] = torch.arange(20)
    w = world(shape, [Ask(query_len, 20, slot_positions=far), Ask(query_len, 20, slot_positions=half)])
    out = attend(w, **how)
    assert torch.equal(out[:query_len], torch.zeros_like(out[:query_len]))
    assert torch.equal(out[query_len:, : shape.group], torch.zeros_like(out[query_len:, : shape.group]))
    assert_equal(out, expected(w, **how))


@ALL_HOW
def test_spare_blocks_are_ignored(how: dict) -> None:
    w = world(Shape(), [Ask(1, 16, spare=1), Ask(1, 40, spare=2), Ask(16, 16, spare=1)])
    assert_equal(attend(w, **how), expected(w, **how))


@pytest.mark.parametrize("num_scores", [1, 2000, 9000])
@ALL_HOW
def test_cutting_long_query_ranges_changes_nothing(how: dict, num_scores: int, monkeypatch) -> None:
    w = world(
        Shape(), [*asks("mixed"), Ask(9, 30, shift=6, slot_positions=random_positions(1, Shape(), 20, 6))]
    )
    whole = attend(w, **how)
    monkeypatch.setattr(reference.attention, "MAX_SCORES", num_scores)
    assert_equal(attend(w, **how), whole)


@ALL_HOW
@pytest.mark.parametrize("kind", LENGTHS)
def test_a_sequence_does_not_depend_on_its_neighbours(how: dict, kind: str) -> None:
    """Last-bit differences apart, which come from the padding of a group."""
    w = world(Shape(), asks(kind))
    together = attend(w, **how)
    first = 0
    for ask, slots in zip(w.asks, w.batch.sequences, strict=True):
        last = first + ask.query_len
        batch = type(w.batch).build((slots,), w.shape.block_size, w.q.device)
        how_all = {"scale": w.shape.dim**-0.5, **how}
        alone = reference.paged_attention(w.q[0, first:last], under(w.cache, 0, **how_all), batch)
        torch.testing.assert_close(together[first:last], alone, atol=1e-6, rtol=1e-6)
        first = last


def test_nothing_is_mutated() -> None:
    w = world(Shape(), asks("mixed"))
    before = [x.clone() for x in (w.q, w.cache.k, w.cache.v)]
    attend(w, window=7, softcap=2.0)
    for x, y in zip((w.q, w.cache.k, w.cache.v), before, strict=True):
        assert torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


@st.composite
def batches(draw):
    block_size = draw(st.integers(1, 6))
    lengths = st.integers(1, 30).flatmap(
        lambda n: st.tuples(st.integers(1, n), st.just(n), st.integers(0, 2))
    )
    batch = [Ask(q, n, spare=spare) for q, n, spare in draw(st.lists(lengths, min_size=1, max_size=5))]
    shape = Shape(draw(st.integers(1, 3)), draw(st.integers(1, 3)), dim=8, block_size=block_size)
    return shape, batch, draw(st.integers(0, 99)), draw(st.none() | st.integers(1, 9))


@settings(max_examples=40, deadline=None)
@given(batches())
def test_any_block_tables(case) -> None:
    shape, batch, seed, window = case
    w = world(shape, batch, seed)
    assert_equal(attend(w, window=window), expected(w, window=window))


@given(batches())
@settings(max_examples=40, deadline=None)
def test_every_sequence_is_in_one_group(case) -> None:
    """And every token of the batch is computed: the rows of the groups cover them all."""
    shape, batch, seed, _ = case
    w = world(shape, batch, seed)
    members = [seq for group in w.batch.groups for seq in group.sequences]
    assert sorted(map(id, members)) == sorted(map(id, w.batch.sequences))
    rows = torch.cat([group.rows.flatten() for group in w.batch.groups])
    assert rows.unique().tolist() == list(range(sum(ask.query_len for ask in batch)))


@given(batches())
@settings(max_examples=40, deadline=None)
def test_slot_mapping_is_the_place_of_each_new_token(case) -> None:
    shape, batch, seed, _ = case
    w = world(shape, batch, seed)
    places = []
    for ask, slots in zip(w.asks, w.batch.sequences, strict=True):
        for slot in range(ask.seq_len - ask.query_len, ask.seq_len):
            block, offset = divmod(slot, shape.block_size)
            places.append(int(slots.block_ids[block]) * shape.block_size + offset)
    assert w.batch.slot_mapping.tolist() == places
