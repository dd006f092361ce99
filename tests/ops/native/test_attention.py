"""Native attention equals the reference, whatever the shapes, lengths, masks and neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_oracle import DTYPES, under
from tolerances import assert_close
from twins import HOW, LENGTHS, SHAPES, Ask, Shape, asks, attend_both, noise, twins

from kvreclaim.ops import native

pytestmark = pytest.mark.usefixtures("isa")


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", LENGTHS)
def test_every_shape_and_length(shape: Shape, kind: str, dtype: torch.dtype) -> None:
    w = twins(replace(shape, dtype=dtype), asks(kind))
    assert_close(*attend_both(w))


@DTYPES
@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize("kind", ["edges", "long", "chunks"])
def test_every_kind_of_softmax(how: dict, kind: str, dtype: torch.dtype) -> None:
    w = twins(Shape(dtype=dtype), asks(kind))
    assert_close(*attend_both(w, **how))


def test_seventy_sequences_of_very_different_lengths(threads: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 12, 70).tolist()
    w = twins(
        Shape(dim=32, dtype=torch.bfloat16), [Ask(min(1 + i % 3, n**3), n**3) for i, n in enumerate(lengths)]
    )
    assert_close(*attend_both(w))


def moved(shape: Shape, query_len: int, seq_len: int, seed: int) -> Ask:
    """Slots moved by compaction, all but the last few: other ones per layer and head."""
    size = (shape.layers, shape.kv_heads, max(seq_len - 3, 1))
    positions = (torch.arange(size[-1]) * 2 + (noise(seed + 1, *size) > 0)).int()
    return Ask(query_len, seq_len, seq_len, positions)


@DTYPES
@pytest.mark.parametrize("window", [None, 9, 400])
def test_slot_positions(window: int | None, dtype: torch.dtype) -> None:
    shape = Shape(kv_heads=2, group=3, dim=32, layers=2, dtype=dtype)
    lengths = [(1, 40), (5, 90), (1, 1200), (30, 200)]
    w = twins(shape, [moved(shape, *pair, seed=i) for i, pair in enumerate(lengths)])
    for layer in range(2):
        assert_close(*attend_both(w, layer, window=window))


def test_a_row_that_sees_nothing_is_zero() -> None:
    shape = Shape(kv_heads=1, group=2, dim=32)
    w = twins(shape, [Ask(1, 600, slot_positions=torch.full((1, 1, 600), -100, dtype=torch.int32))])
    for sinks in (None, torch.zeros(2)):
        out = attend_both(w, sinks=sinks, window=9)[0]
        assert torch.equal(out, torch.zeros_like(out))


@DTYPES
def test_queries_with_the_strides_of_a_model(dtype: torch.dtype) -> None:
    """Models give [T, H, D] as a view of [1, H, T, D]; any other strides are taken too."""
    w = twins(Shape(dtype=dtype), [Ask(6, 40), Ask(1, 20)])
    turned = w.q.transpose(0, 1).contiguous().transpose(0, 1)
    sparse = torch.full((*w.q.shape, 3), torch.nan, dtype=dtype)
    sparse[..., 1] = w.q
    want = attend_both(w)
    for q in (turned, sparse[..., 1]):
        assert torch.equal(attend_both(w, q=q)[0], want[0])


def test_float_queries_over_a_bf16_cache() -> None:
    w = twins(Shape(dtype=torch.bfloat16), [Ask(3, 40), Ask(1, 300)])
    got, want = attend_both(w, q=w.q.float())
    assert got.dtype == torch.float32
    assert_close(got, want)


def test_rows_of_no_sequence_are_zero() -> None:
    w = twins(Shape(), [Ask(2, 40)])
    padded = torch.cat([w.q, w.q])
    out = native.paged_attention(padded, under(w.native, 0, scale=0.1), w.batch)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


def test_nan_in_a_live_slot_is_not_hidden() -> None:
    w = twins(Shape(), [Ask(1, 40)])
    q = w.q.clone()
    q[0, 3, 5] = torch.nan
    out = native.paged_attention(q, under(w.native, 0, scale=0.1), w.batch)
    assert out[0, 3].isnan().all()
    assert not out[0, :3].isnan().any()


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 700)), min_size=1, max_size=12),
    group=st.sampled_from([1, 2, 4, 8]),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 800),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_any_block_tables(
    lengths: list[tuple[int, int]],
    group: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    shape = Shape(kv_heads=2, group=group, dim=16, block_size=block_size, dtype=dtype)
    w = twins(shape, [Ask(queries, queries + before, shift=3) for queries, before in lengths], seed)
    assert_close(*attend_both(w, window=window))
