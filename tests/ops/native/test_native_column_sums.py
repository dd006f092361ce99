"""Native column sums equal the reference's, whatever the shapes, lengths, masks and neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_oracle import DTYPES, under
from torch import Tensor
from twins import HOW, LENGTHS, SHAPES, Ask, Shape, Twins, asks, noise, twins

from kvreclaim.ops import extension, native, reference
from kvreclaim.ops.native.storage import cache_view, make_batch

pytestmark = pytest.mark.usefixtures("isa")
CLOSE = {"atol": 1e-5, "rtol": 2e-5}


def sum_both(w: Twins, layer: int = 0, **how) -> tuple[Tensor, Tensor]:
    how = {"scale": w.shape.dim**-0.5, **how}
    ours = native.column_sums(w.q, under(w.native, layer, **how), w.batch)
    return ours, reference.column_sums(w.q, under(w.reference, layer, **how), w.batch)


def assert_equal_sums(w: Twins, layer: int = 0, **how) -> None:
    ours, theirs = sum_both(w, layer, **how)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", LENGTHS)
def test_every_shape_and_length(shape: Shape, kind: str, dtype: torch.dtype) -> None:
    assert_equal_sums(twins(replace(shape, dtype=dtype), asks(kind)))


@DTYPES
@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize("kind", ["edges", "long", "chunks"])
def test_every_kind_of_softmax(how: dict, kind: str, dtype: torch.dtype) -> None:
    assert_equal_sums(twins(Shape(dtype=dtype), asks(kind)), **how)


def positions(seed: int, shape: Shape, slots: int, shift: int) -> Tensor:
    order = noise(seed, shape.layers, shape.kv_heads, slots + shift).argsort(-1)[..., :slots]
    return order.sort(-1).values.to(torch.int32)


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 30])
def test_positions_of_each_layer_and_head(window: int | None, dtype: torch.dtype) -> None:
    shape = Shape(layers=3, dtype=dtype)
    batch = [
        Ask(1, 140, shift=2, slot_positions=positions(3, shape, 133, 2)),
        Ask(1, 40),
        Ask(5, 150, shift=9, slot_positions=positions(1, shape, 125, 9)),
        Ask(9, 80, shift=6, slot_positions=positions(2, shape, 70, 6)),
        Ask(1, 21, shift=100),
    ]
    w = twins(shape, batch)
    for layer in (0, 2, 1):
        assert_equal_sums(w, layer, window=window)


def test_a_row_that_sees_nothing_adds_nothing() -> None:
    shape = Shape()
    far = torch.full((1, shape.kv_heads, 70), -100, dtype=torch.int32)
    w = twins(shape, [Ask(1, 70, slot_positions=far), Ask(3, 70, slot_positions=far)])
    assert torch.equal(sum_both(w, window=9)[0], torch.zeros(2, shape.kv_heads, 70))
    assert_equal_sums(w, window=9, sinks=torch.linspace(-2, 3, 8))


def test_queries_with_any_strides() -> None:
    w = twins(Shape(dtype=torch.bfloat16), asks("chunks"))
    want = sum_both(w)[1]
    how = {"scale": w.shape.dim**-0.5}
    for q in (
        w.q.transpose(0, 1).contiguous().transpose(0, 1),
        w.q.transpose(1, 2).contiguous().transpose(1, 2),
        w.q.float(),
    ):
        torch.testing.assert_close(native.column_sums(q, under(w.native, 0, **how), w.batch), want, **CLOSE)


def test_neither_neighbours_nor_threads_change_a_bit() -> None:
    w = twins(Shape(dtype=torch.bfloat16), [Ask(1, 900), Ask(30, 200), Ask(1, 33)])
    how = {"scale": w.shape.dim**-0.5}
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(native.column_sums(w.q, under(w.native, 0, **how), w.batch))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    alone = type(w.batch).build(w.batch.sequences[1:2], w.shape.block_size, w.q.device)
    one = native.column_sums(w.q[1:31].contiguous(), under(w.native, 0, **how), alone)
    assert torch.equal(one[0], results[0][1, :, :200])
    assert torch.equal(results[0][1, :, 200:], torch.zeros(2, 700))


@st.composite
def batches(draw) -> tuple[Shape, list[Ask], int | None]:
    lengths = st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, min(n, 40)), st.just(n)))
    batch = [Ask(*pair) for pair in draw(st.lists(lengths, min_size=1, max_size=5))]
    shape = Shape(draw(st.integers(1, 3)), draw(st.integers(1, 9)), dim=8 * draw(st.integers(1, 4)))
    return (
        replace(shape, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16]))),
        batch,
        draw(st.none() | st.integers(1, 90)),
    )


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(batches())
def test_any_batch(case: tuple[Shape, list[Ask], int | None]) -> None:
    shape, batch, window = case
    assert_equal_sums(twins(shape, batch), window=window)


def test_what_does_not_fit_is_refused() -> None:
    w = twins(Shape(), asks("chunks"))
    view, batch = cache_view(w.native), w.batch.cached("native", make_batch)
    kernel = extension.native().column_sums
    for sums in (torch.empty(6, 2, 599), torch.empty(5, 2, 600), torch.empty(6, 1, 600)):
        with pytest.raises(ValueError, match="sums has"):
            kernel(w.q, sums, view, 0, batch, 1.0, 0.0, 0, None)
    with pytest.raises(ValueError, match="q has fewer rows"):
        kernel(w.q[1:], torch.empty(6, 2, 600), view, 0, batch, 1.0, 0.0, 0, None)
    with pytest.raises(IndexError, match="layer"):
        kernel(w.q, torch.empty(6, 2, 600), view, 1, batch, 1.0, 0.0, 0, None)
