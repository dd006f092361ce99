"""Batches over cells reach the kernels as arrays, and say what their sequences one by one would say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from twins import Ask, Shape, Twins, noise, twins

from kvreclaim.ops import native
from kvreclaim.ops.batch import AttentionBatch, BatchArrays
from kvreclaim.ops.cells import CellBatch, cell_batch, cell_layers
from kvreclaim.ops.extension import native as module
from kvreclaim.ops.kv_cache import LayerCache
from kvreclaim.ops.native.storage import make_batch

LENGTHS = st.integers(1, 70).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def ints(*values: int | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cells_of(w: Twins, layer: int) -> CellBatch:
    """Every KV head of every sequence as a sequence over its own cells; what pads a row names no cell."""
    cache, rows = w.native, w.batch.sequences
    widest = max(len(seq.block_ids) for seq in rows)
    table = np.full((len(rows), cache.num_kv_heads, widest), -1, dtype=np.int32)
    for i, seq in enumerate(rows):
        for head in range(cache.num_kv_heads):
            ids = (layer * cache.num_blocks + seq.block_ids) * cache.num_kv_heads + head
            table[i, head, : len(ids)] = ids
    lengths, query_lens = (
        np.repeat([getattr(seq, name) for seq in rows], cache.num_kv_heads)
        for name in ("seq_len", "query_len")
    )
    table = table.reshape(-1, widest)
    given = BatchArrays(
        block_table=torch.from_numpy(table),
        query_starts=torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32)),
        seq_lens=torch.from_numpy(lengths.astype(np.int32)),
        shifts=torch.zeros(len(lengths), dtype=torch.int32),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(lengths.max()),
    )
    return cell_batch(table, lengths, query_lens, given, cache.block_size)


def cell_queries(w: Twins, batch: CellBatch) -> Tensor:
    return noise(3, int(batch.query_lens.sum()), w.shape.group, w.shape.dim, dtype=w.shape.dtype)


def one_by_one(batch: CellBatch) -> AttentionBatch:
    return AttentionBatch(tuple(batch.sequences), batch.slot_mapping, batch.block_size)


def layer_of(w: Twins, layer: int) -> LayerCache:
    softmax = replace(w.native.layers[layer].softmax, scale=w.shape.dim**-0.5, softcap=2.0)
    return replace(cell_layers(w.native)[layer], softmax=softmax)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=5), layer=st.integers(0, 1), bf16=st.booleans())
def test_arrays_equal_sequences_one_by_one(lengths, layer: int, bf16: bool) -> None:
    shape = Shape(dim=32, layers=2, dtype=torch.bfloat16 if bf16 else torch.float32)
    w = twins(shape, [Ask(*lengths) for lengths in lengths])
    batch, where = cells_of(w, layer), layer_of(w, layer)
    q, plain = cell_queries(w, batch), one_by_one(batch)
    for op in (native.paged_attention, native.column_sums):
        assert torch.equal(op(q, where, batch), op(q, where, plain))


def test_a_step_takes_no_sequence_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    w = twins(Shape(dim=32), [Ask(1, 40), Ask(3, 20)])
    batch, where = cells_of(w, 0), layer_of(w, 0)
    made = type(batch.sequences).__dict__["_made"]
    monkeypatch.setattr(made, "func", lambda rows: pytest.fail("a sequence was made"))
    q = cell_queries(w, batch)
    native.paged_attention(q, where, batch)
    native.column_sums(q, where, batch)
    with pytest.raises(pytest.fail.Exception, match="a sequence was made"):
        one_by_one(batch)


def test_a_cell_outside_the_cache_is_refused() -> None:
    w = twins(Shape(dim=32), [Ask(1, 40)])
    batch = cells_of(w, 0)
    batch.given.block_table[1, 2] = w.native.num_blocks * w.native.num_kv_heads
    with pytest.raises(IndexError, match="outside the cache"):
        native.paged_attention(cell_queries(w, batch), layer_of(w, 0), batch)


GOOD = {
    "block_table": ints([3, 4], [5, 6]),
    "query_starts": ints(0, 1, 3),
    "seq_lens": ints(20, 32),
    "shifts": ints(0, 0),
}
BAD = [
    ("block_table", ints([3, -1], [5, 6]), "negative block"),
    ("block_table", ints([3], [5]), "too few blocks"),
    ("block_table", ints([3, 4], [5, 6]).T, "not contiguous"),
    ("block_table", ints([3, 4], [5, 6]).long(), "dtype"),
    ("block_table", ints(3, 4), "number of dims"),
    ("query_starts", ints(0, 1), "query_starts has a shape"),
    ("query_starts", ints(1, 1, 3), "begin with 0"),
    ("query_starts", ints(0, 3, 2), "descends"),
    ("query_starts", ints(0, 1, 34), "more rows"),
    ("query_starts", ints(0, 1, 3).float(), "dtype"),
    ("seq_lens", ints(20), "seq_lens has a shape"),
    ("seq_lens", ints(20, -1), "more rows"),
    ("seq_lens", ints(20, 33), "too few blocks"),
    ("seq_lens", ints(20, 32).long(), "dtype"),
    ("shifts", ints(0, 0, 0), "shifts has a shape"),
    ("shifts", ints(0, 0).long(), "dtype"),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD, ids=[f"{name}: {words}" for name, _, words in BAD])
def test_bad_arrays_are_refused(name: str, value: Tensor, words: str) -> None:
    module().Batch.from_arrays(16, **GOOD)
    with pytest.raises(ValueError, match=words):
        module().Batch.from_arrays(16, **{**GOOD, name: value})


def test_the_view_is_made_once_a_batch() -> None:
    batch = cells_of(twins(Shape(dim=32), [Ask(1, 40)]), 0)
    assert batch.cached("native", make_batch) is batch.cached("native", make_batch)
