"""Rows of a sequence that are computed together, a token and drafts behind it, are what each would be alone,
to the last bit: in every format, on every instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from column_sums_oracle import random_positions
from format_fill import CPU, Filled, Rig, fill
from paged_oracle import Ask, Shape, under
from torch import Tensor

from kvreclaim.ops import native
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.cells import cell_view, natural_cells
from kvreclaim.ops.extension import native as module
from kvreclaim.ops.formats import FORMATS

SHAPES = {
    "d32 g1": Shape(kv_heads=4, group=1, dim=32),
    "d64 g2": Shape(kv_heads=2, group=2, dim=64),
    "d64 g4": Shape(kv_heads=2, group=4, dim=64),
    "d80 v40 g3 s32": Shape(kv_heads=1, group=3, dim=80, v_dim=40, block_size=32),
    "d96 v160 g5": Shape(kv_heads=1, group=5, dim=96, v_dim=160),
    "d128 g8": Shape(kv_heads=1, group=8, dim=128),
    "latent": Shape(kv_heads=1, group=5, dim=64, v_dim=32, latent=True),
}
MOST = 33
LENGTHS = [
    (2, 2),
    (5, 40),
    (1, 64),
    (9, 512),
    (17, 520),
    (2, 513),
    (5, 1027),
    (33, 2060),
    (9, 3000),
    (33, 33),
]
BEYOND = [(9, 8196), (1, 9000), (17, 30), (33, 8222)]
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 600},
    "narrow window": {"window": 3},
    "softcap+window": {"softcap": 1.5, "window": 70},
    "sinks": {"sinks": True},
}


@pytest.fixture(params=native.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.force_isa(request.param)
    yield request.param
    native.force_isa(native.supported_isas()[0])


@cache
def filled(name: str, shape: str, dtype: torch.dtype, lengths: tuple[tuple[int, int], ...]) -> Filled:
    return fill(Rig(native, FORMATS[name], dtype), SHAPES[shape], [Ask(*each) for each in lengths])


def each_alone(batch: AttentionBatch) -> AttentionBatch:
    """Every row as the only one of a sequence that ends with it."""
    rows = tuple(
        replace(seq, query_len=1, seq_len=seq.seq_len - seq.query_len + i + 1)
        for seq in batch.sequences
        for i in range(seq.query_len)
    )
    return AttentionBatch.build(rows, batch.block_size, CPU)


def check(w: Filled, q: Tensor, **how: Any) -> None:
    if how.get("sinks"):
        how = {**how, "sinks": torch.linspace(-2, 3, w.shape.heads)}
    layer = under(w.cache, 0, **{"scale": w.shape.dim**-0.5, **how})
    together, alone = (
        native.paged_attention(q, layer, w.batch),
        native.paged_attention(q, layer, each_alone(w.batch)),
    )
    assert alone.isfinite().all()
    assert torch.equal(together, alone), wrong_rows(w, together, alone)


def wrong_rows(w: Filled, together: Tensor, alone: Tensor) -> str:
    off = (together != alone).flatten(1).any(1)
    first, lines = 0, []
    for ask in w.asks:
        rows = off[first : first + ask.query_len].nonzero()[:, 0].tolist()
        lines += [f"rows {rows} of {ask.query_len} at {ask.seq_len}"] if rows else []
        first += ask.query_len
    return "; ".join(lines)


def queries(w: Filled, dtype: torch.dtype) -> Tensor:
    return w.q[0].to(dtype)


def test_the_bound_is_the_kernels() -> None:
    assert module().exact_queries == native.EXACT_QUERIES == MOST


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_together_are_rows_alone(isa: str, name: str, shape: str, dtype: torch.dtype) -> None:
    written = torch.float32 if name == "fp32" else torch.bfloat16
    w = filled(name, shape, written, tuple(LENGTHS))
    for how in HOW.values():
        check(w, queries(w, dtype), **how)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_any_number_of_threads(threads: int, name: str, dtype: torch.dtype) -> None:
    w = filled(name, "d64 g2", torch.bfloat16, tuple(LENGTHS))
    check(w, queries(w, dtype), window=600)


@pytest.mark.parametrize("name", FORMATS)
def test_beyond_the_longest_part(isa: str, name: str) -> None:
    w = filled(name, "d64 g2", torch.bfloat16, tuple(BEYOND))
    for how in HOW.values():
        check(w, queries(w, torch.bfloat16), **how)


@pytest.mark.parametrize("name", FORMATS)
def test_where_slots_are_at_positions_of_their_own(isa: str, name: str) -> None:
    shape = replace(SHAPES["d64 g4"], dtype=torch.bfloat16)
    asks = [
        Ask(9, 300, shift=20, slot_positions=random_positions(1, shape, 280, 20)),
        Ask(17, 600, shift=5, slot_positions=random_positions(2, shape, 583, 5)),
        Ask(5, 150, shift=40, slot_positions=random_positions(3, shape, 140, 180)),
    ]
    w = fill(Rig(native, FORMATS[name], torch.bfloat16), shape, asks)
    for how in HOW.values():
        check(w, queries(w, torch.bfloat16), **how)


@pytest.mark.parametrize("name", FORMATS)
def test_over_cells_of_uneven_heads(isa: str, name: str) -> None:
    """Each KV head of a sequence is a sequence of its own, of a length of its own."""
    w = filled(name, "d64 g4", torch.bfloat16, tuple(LENGTHS))
    size, rows = w.shape.block_size, []
    for seq in w.batch.sequences:
        cells = natural_cells(w.cache, seq.block_ids)[0]
        for head, ids in enumerate(cells):
            length = max(seq.query_len, seq.seq_len - 7 * head)
            rows.append(replace(seq, block_ids=np.ascontiguousarray(ids, dtype=np.int32), seq_len=length))
    batch = AttentionBatch.build(tuple(rows), size, CPU)
    view = under(cell_view(w.cache), 0, scale=0.125)
    q = torch.randn(
        int(batch.query_lens.sum()), w.shape.group, 64, generator=torch.Generator().manual_seed(1)
    )
    for dtype in (torch.bfloat16, torch.float32):
        got = native.paged_attention(q.to(dtype), view, batch)
        assert torch.equal(got, native.paged_attention(q.to(dtype), view, each_alone(batch)))


def test_sinks_of_every_sequence_stay_its_own(isa: str) -> None:
    """Sinks are as many as heads of all sequences: rows across a cut of the keys keep their sequence's."""
    w = filled("bf16", "d64 g2", torch.bfloat16, ((9, 2050), (5, 40)))
    sinks = torch.linspace(-2, 9, 2 * w.shape.heads)
    got = native.paged_attention(
        queries(w, torch.float32), under(w.cache, 0, scale=0.125, sinks=sinks), w.batch
    )
    first = 0
    for index, seq in enumerate(w.batch.sequences):
        own = under(w.cache, 0, scale=0.125, sinks=sinks[index * w.shape.heads :][: w.shape.heads])
        one = each_alone(AttentionBatch.build((seq,), w.shape.block_size, CPU))
        rows = queries(w, torch.float32)[first : first + seq.query_len]
        assert torch.equal(got[first : first + seq.query_len], native.paged_attention(rows, own, one))
        first += seq.query_len
