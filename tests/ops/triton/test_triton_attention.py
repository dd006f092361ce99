"""Triton attention equals the reference, whatever the shapes, lengths, masks and neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from column_sums_oracle import random_positions
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import Ask, Shape, under, world
from triton_pair import DEVICE, DTYPES, assert_close, attend_both, on_device, poisoned, wanted

from kvreclaim.ops import triton as kernels
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.triton import plan
from kvreclaim.ops.triton.plan import MIN_SPLIT, decode_tables, num_shares, tile_splits

SHAPES = [
    Shape(kv_heads=1, group=1, dim=32, block_size=16),
    Shape(kv_heads=2, group=4, dim=64, block_size=16),
    Shape(kv_heads=1, group=8, dim=80, block_size=32),
    Shape(kv_heads=2, group=1, dim=96, block_size=4),
    Shape(kv_heads=1, group=4, dim=128, block_size=1),
    Shape(kv_heads=1, group=3, dim=256, block_size=16),
    Shape(kv_heads=2, group=2, dim=64, v_dim=32, block_size=8),
    Shape(kv_heads=1, group=20, dim=24, v_dim=40, block_size=5),
]
LENGTHS = {
    "decode": [(1, n) for n in (1, 2, 15, 16, 17, 33, 63, 64, 65)],
    "prefill": [(1, 1), (15, 15), (16, 16), (17, 17), (40, 40)],
    "mixed": [(1, 66), (0, 0), (20, 20), (1, 1), (6, 38), (0, 20), (2, 70), (0, 0)],
}
HOW = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 3, 4)},
    "window": {"window": 7},
    "wide window": {"window": 90},
    "all": {"softcap": 4.0, "sinks": torch.linspace(-2, 3, 4), "window": 20, "scale": 0.7},
    "large scale": {"scale": 2.0},
}
ALL_HOW = pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())


def asks(kind: str) -> list[Ask]:
    return [Ask(*lengths) for lengths in LENGTHS[kind]]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape: Shape, dtype: torch.dtype) -> None:
    got, want = attend_both(world(replace(shape, dtype=dtype), asks("mixed")))
    assert got.dtype == dtype
    assert_close(got, want)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_lengths_around_the_edges_of_blocks_and_tiles(shape: Shape, kind: str) -> None:
    assert_close(*attend_both(world(shape, asks(kind))))


@DTYPES
@ALL_HOW
def test_every_kind_of_softmax(how: dict, dtype: torch.dtype) -> None:
    batch = [Ask(1, 1), Ask(1, 130), Ask(20, 20), Ask(3, 100, shift=5), Ask(0, 0)]
    assert_close(*attend_both(world(Shape(dtype=dtype), batch), **how))


@pytest.mark.parametrize(
    "lengths", [(511, 512, 513), (1500,), (1, 700, 300), (9, 3000, 30, 400, 30, 30)], ids=str
)
@pytest.mark.parametrize("how", [{}, HOW["all"], HOW["sinks"]], ids=["plain", "all", "sinks"])
def test_long_sequences_are_split(lengths: tuple[int, ...], how: dict) -> None:
    w = world(Shape(kv_heads=1, group=4), [Ask(1, length) for length in lengths])
    tables = decode_tables(w.batch, 1)
    assert tables is not None
    assert tables.shares is not None
    assert tables.shares.units[:, 2].max() > 1
    assert_close(*attend_both(w, **how))


SPLIT = [(4, 5, {}), (4, 33, HOW["all"]), (4, 5, HOW["sinks"]), (1, 70, {"window": 700}), (7, 9, {})]


@pytest.mark.parametrize(("group", "queries", "how"), SPLIT, ids=str)
def test_several_queries_of_a_long_sequence_are_split(group: int, queries: int, how: dict) -> None:
    """Verification of drafts and chunks of a prompt have such queries. The last tile is not full."""
    w = world(Shape(kv_heads=1, group=group), [Ask(1, 40), Ask(queries, 1100, shift=2), Ask(2, 2)])
    assert tile_splits(w.batch, 2, 1) == 5
    assert_close(*attend_both(w, **how))


def test_seventy_sequences() -> None:
    """Lengths are very different, in an order that has nothing to do with them."""
    lengths = [1 + (i * 37) % 23 for i in range(66)] + [200, 1, 64, 333]
    w = world(Shape(kv_heads=1, group=2, dim=32), [Ask(1 + i % 2, 1 + n) for i, n in enumerate(lengths)])
    assert_close(*attend_both(w))


@pytest.mark.parametrize("how", [{}, {"window": 9}, HOW["all"]], ids=["plain", "window", "all"])
def test_positions_of_each_layer_and_head(how: dict) -> None:
    """Some sequences have them, of other lengths than their own; every layer and head has others."""
    shape = Shape(layers=2)
    batch = [
        Ask(1, 30, shift=9, slot_positions=random_positions(1, shape, 25, 9)),
        Ask(1, 40),
        Ask(5, 50, shift=3, slot_positions=random_positions(3, shape, 45, 3)),
        Ask(1, 21, shift=100),
        Ask(2, 24, shift=6, slot_positions=random_positions(2, shape, 20, 6)),
        Ask(4, 20, slot_positions=random_positions(4, shape, 2, 0)[:, :, :1]),
    ]
    w = world(shape, batch)
    for layer in range(2):
        assert_close(*attend_both(w, layer, **how))


@pytest.mark.parametrize("how", [{}, HOW["sinks"], HOW["softcap"]], ids=["plain", "sinks", "softcap"])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("length", [20, 600])
def test_a_row_that_sees_nothing_is_zero(how: dict, query_len: int, length: int) -> None:
    shape = Shape(kv_heads=2, dim=16)
    how = {**how, "window": 9}
    far = torch.full((1, shape.kv_heads, length), -1000, dtype=torch.int32)
    half = far.clone()
    half[:, 1] = torch.arange(length)
    w = world(
        shape, [Ask(query_len, length, slot_positions=far), Ask(query_len, length, slot_positions=half)]
    )
    got, want = attend_both(w, **how)
    assert torch.equal(got[:query_len].cpu(), torch.zeros_like(want[:query_len]))
    assert_close(got, want)


def test_no_tokens_at_all() -> None:
    w = world(Shape(dim=16), [Ask(0, 0), Ask(0, 3)])
    got, _ = attend_both(w)
    assert got.shape == (0, 4, 16)


def test_queries_of_any_strides() -> None:
    """The model passes such queries: the token dim is not the outermost one."""
    w = world(Shape(), asks("mixed"))
    cache, batch = on_device(w.cache), AttentionBatch.build(w.batch.sequences, 16, DEVICE)
    q = w.q[0].to(DEVICE)
    plain = kernels.paged_attention(q, under(cache, 0, scale=0.3), batch)
    for strange in (q.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([q, q], -1)[..., 0]):
        assert torch.equal(kernels.paged_attention(strange, under(cache, 0, scale=0.3), batch), plain)


def test_nothing_is_mutated() -> None:
    w = world(Shape(), asks("mixed"))
    cache, q = on_device(w.cache), w.q[0].to(DEVICE)
    before = [x.clone() for x in (q, cache.k, cache.v)]
    batch = AttentionBatch.build(w.batch.sequences, 16, DEVICE)
    kernels.paged_attention(q, under(cache, 0, scale=0.3, window=7, softcap=2.0), batch)
    for x, y in zip((q, cache.k, cache.v), before, strict=True):
        assert torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


@st.composite
def batches(draw):
    block_size = draw(st.integers(1, 6))
    lengths = st.integers(0, 30).flatmap(
        lambda n: st.tuples(st.integers(min(n, 1), n), st.just(n), st.integers(0, 2))
    )
    batch = [Ask(q, n, spare=spare) for q, n, spare in draw(st.lists(lengths, min_size=1, max_size=4))]
    shape = Shape(draw(st.integers(1, 2)), draw(st.integers(1, 3)), dim=8, block_size=block_size)
    return shape, batch, draw(st.integers(0, 99)), draw(st.none() | st.integers(1, 9))


@settings(max_examples=15, deadline=None)
@given(batches())
def test_any_block_tables(case) -> None:
    shape, batch, seed, window = case
    assert_close(*attend_both(world(shape, batch, seed), window=window))


@given(
    lengths=st.lists(st.integers(0, 5000) | st.integers(0, 200_000), min_size=1, max_size=40),
    heads=st.integers(1, 20),
    at_once=st.sampled_from([1, 4, 64]),
)
@settings(max_examples=60, deadline=None)
def test_shares_follow_lengths(lengths: list[int], heads: int, at_once: int) -> None:
    """Each sequence has its part of the device by its tokens, and every share of it is one unit."""
    held, longest = torch.tensor(lengths, dtype=torch.int32, device=DEVICE), max(lengths)
    table = torch.zeros(len(lengths), 1, dtype=torch.int32, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "ROWS_AT_ONCE", at_once)
        tables = kernels.static_tables(table, held, held * 0, num_kv_heads=heads, max_seq_len=longest)
        shares = tables.shares
    wanted = num_shares(len(lengths), heads, longest, DEVICE)
    if wanted is None:
        assert shares is None
        return
    total, counts = max(1, sum(lengths)), shares.firsts.diff().tolist()
    for length, count in zip(lengths, counts, strict=True):
        fair = length * wanted / total
        assert 1 <= count <= max(1, -(-length // MIN_SPLIT))
        assert count <= max(1, fair + 0.5)
        assert count > fair - 0.51 or count == -(-length // MIN_SPLIT)
    units = [[row, share, count] for row, count in enumerate(counts) for share in range(count)]
    found = shares.units.tolist()
    assert found[: len(units)] == units
    assert [(row, count) for row, _, count in found[len(units) :]] == [(0, 0)] * (len(found) - len(units))


@pytest.mark.parametrize("lengths", [[32768] + [1024] * 31, [2048] * 32], ids=["one", "all"])
def test_one_long_sequence_is_no_longer_than_the_others(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    """Tiles of 64 tokens in the longest share, on 132 multiprocessors with 8 KV heads."""
    monkeypatch.setattr(plan, "num_processors", lambda device: 132)
    held = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    shares = kernels.static_tables(held[:, None], held, held, num_kv_heads=8, max_seq_len=1 << 15).shares
    counts = shares.firsts.diff()
    assert int((held / 64 / counts).ceil().max()) == 16


@pytest.mark.parametrize("how", [{}, {"window": 30}, HOW["all"]], ids=["plain", "window", "all"])
@pytest.mark.parametrize("max_seq_len", [256, 4096])
def test_one_set_of_tables_serves_step_after_step(how: dict, max_seq_len: int) -> None:
    """Tensors of a fixed size whose values change, as a replayed graph reads them; empty rows are zero."""
    rows, shape = 4, Shape(kv_heads=1, group=4)
    table = torch.zeros(rows, 40, dtype=torch.int32, device=DEVICE)
    lengths, shifts = (torch.zeros(rows, dtype=torch.int32, device=DEVICE) for _ in range(2))
    tables = kernels.static_tables(table, lengths, shifts, num_kv_heads=1, max_seq_len=max_seq_len)
    how = {"scale": 0.25, **how}
    there = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    for seed, used in enumerate([[300, 1, 17], [5], [16, 64, 65, 130]]):
        w = world(shape, [Ask(1, n, shift=seed) for n in used], seed)
        want = wanted(w, **how)
        arrays, n = w.batch.arrays, len(used)
        table.fill_(7)
        table[:n, : arrays.block_table.shape[1]] = arrays.block_table.to(DEVICE)
        lengths.zero_()[:n] = arrays.seq_lens.to(DEVICE)
        shifts[:n] = arrays.shifts.to(DEVICE)
        q = torch.full((rows, shape.heads, shape.dim), 3.0, device=DEVICE)
        q[:n] = w.q[0].to(DEVICE)
        got = kernels.decode_attention(q, under(poisoned(w), 0, **there), tables)
        assert_close(got[:n], want)
        assert not got[n:].any()
