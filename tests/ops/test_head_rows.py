"""Rows of unequal length, and what is done to all of them at once, against loops over lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launches import counted

from kvreclaim.ops import native, reference
from kvreclaim.ops.cell_tables import CellMoves, assign_cells
from kvreclaim.ops.head_rows import HeadRows, runs, spread

CPU = torch.device("cpu")
seeds = st.integers(0, 9999)


def random_rows(rng, shape, most):
    counts = rng.integers(0, most, shape)
    return HeadRows(torch.from_numpy(rng.permutation(int(counts.sum()))), counts)


@given(seed=seeds)
def test_runs_and_repeated_values(seed):
    rng = np.random.default_rng(seed)
    starts, lengths = rng.integers(0, 50, (2, 3)), rng.integers(0, 5, (2, 3))
    pairs = [*zip(starts.ravel().tolist(), lengths.ravel().tolist(), strict=True)]
    assert runs(starts, lengths, CPU).tolist() == [i for at, n in pairs for i in range(at, at + n)]
    assert spread(starts, lengths, CPU).tolist() == [at for at, n in pairs for _ in range(n)]


@given(seed=seeds)
def test_rows_are_views_and_take_and_append_work_row_by_row(seed):
    rng = np.random.default_rng(seed)
    rows, numbers = random_rows(rng, (2, 3), 7), torch.arange(100, 120)
    layers = [[own.tolist() for own in layer] for layer in rows]
    assert layers == [[own.tolist() for own in rows[layer]] for layer in range(2)]
    assert [len(own) for layer in layers for own in layer] == rows.counts.ravel().tolist()
    picked = [[sorted(rng.permutation(len(own))[: rng.integers(len(own) + 1)]) for own in x] for x in layers]
    flat = torch.tensor([slot for layer in picked for own in layer for slot in own], dtype=torch.int64)
    taken = rows.take(HeadRows(flat, np.array([[len(own) for own in layer] for layer in picked])))
    starts, counts = rng.integers(0, 15, (2, 3)), rng.integers(0, 5, (2, 3))
    longer = rows.append(numbers, starts, counts)
    for at in np.ndindex(2, 3):
        own, run = layers[at[0]][at[1]], range(100 + starts[at], 100 + starts[at] + counts[at])
        assert taken[at[0]][at[1]].tolist() == [own[slot] for slot in picked[at[0]][at[1]]]
        assert longer[at[0]][at[1]].tolist() == [*own, *run]


@pytest.mark.parametrize("ops", [reference, native])
@given(seed=seeds)
def test_the_best_of_each_run(ops, seed):
    """Many ties, infinities, and scores between the runs."""
    rng = np.random.default_rng(seed)
    lengths, gaps = rng.integers(0, 9, 6), rng.integers(0, 3, 6)
    starts, places = (gaps + lengths).cumsum() - lengths, rng.integers(0, lengths + 1)
    scores = torch.from_numpy(rng.integers(-3, 4, int(starts[-1] + lengths[-1])).astype(np.float32))
    scores[scores == -3] = -torch.inf
    limits = starts, lengths, places
    found = ops.select_runs(scores, *limits)
    parts = [reference.select_top(scores[None, a : a + n], p)[0] + a for a, n, p in zip(*limits, strict=True)]
    assert found.tolist() == torch.cat(parts).tolist()


def assigned(present, held, wanted, every):
    """Cells of each head, and the heads' order: one after the other."""
    own = {
        at: [c for c in present[at][: held[at]] if c in every][: wanted[at]] for at in np.ndindex(held.shape)
    }
    used = {cell for cells in own.values() for cell in cells}
    spare = iter(sorted(set(every.ravel().tolist()) - used))
    order = sorted(own, key=lambda at: len(own[at]) < wanted[at])
    return {at: own[at] + [next(spare) for _ in range(wanted[at] - len(own[at]))] for at in order}


@given(seed=seeds, most=st.integers(1, 30))
def test_cells_are_assigned_and_tokens_moved_as_head_by_head(seed, most):
    rng, size, shape = np.random.default_rng(seed), 4, (2, 3)
    held = rng.integers(1, 6, shape)
    cells = rng.permutation(60).astype(np.int32)
    present = np.full((*shape, 6), cells[-1])
    for at, end in zip(np.ndindex(shape), held.ravel().cumsum(), strict=True):
        present[at][: held[at]] = cells[end - held[at] : end]
    wanted = rng.integers(1, held + 1)
    every = rng.permutation(np.concatenate([rng.permutation(cells[: held.sum()])[:4], cells[held.sum() :]]))
    every = every[: wanted.sum()]
    table, order = assign_cells(present, held, wanted, every)
    expected = assigned(present, held, wanted, every)
    assert [np.unravel_index(i, shape) for i in order] == list(expected)
    for at, own in expected.items():
        assert table[at][: wanted[at]].tolist() == own
        assert set(table[at][wanted[at] :].tolist()) <= {own[0]}
    slots = [np.sort(rng.permutation(held[at] * size)[: wanted[at] * size]) for at in np.ndindex(shape)]
    kept = HeadRows(torch.from_numpy(np.concatenate(slots)), wanted * size)
    pairs = []
    for part, sources, targets in CellMoves(present, held, kept, table, order).parts(size, most):
        places = [(int(sources[s // size]), s % size) for s in part.tolist()]
        pairs += [*zip(places, ((c, i) for c in targets.tolist() for i in range(size)), strict=True)]
    assert pairs == [
        ((present[at][s // size], s % size), (own[i // size], i % size))
        for at, own in expected.items()
        for i, s in enumerate(kept[at[0]][at[1]].tolist())
    ]


def test_launches_count_what_lies_on_the_device():
    x = torch.arange(5.0)
    with counted() as found:
        on_host = torch.from_numpy(np.arange(5)) + torch.ones(5)
        assert float(on_host.sum()) == 15
        (on_host.to(CPU, non_blocking=True) + x).sum().item()
        on_host.to(CPU)
        x.cpu().tolist()
        x[x > 2]
        x.long().bincount()
        x.repeat_interleave(x.long())
        x.repeat_interleave(x.long(), output_size=10)
    assert found.waits == {"item": 1, "to": 1, "cpu": 1, "mask": 1, "bincount": 1, "repeat_interleave": 1}
    assert found.torch["add"] == 1
    assert found.torch["sum"] == 1
