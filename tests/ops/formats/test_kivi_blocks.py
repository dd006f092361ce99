"""kivi4 over blocks: tokens stay exact until their block is full, and a full block never changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kivi_walk import KIVI, Dims, Walk, half_step, key_steps, value_steps

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import native, reference
from kvreclaim.ops.cell_tables import assign_cells
from kvreclaim.ops.cells import cell_view, natural_cells
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.kv_cache import PagedTokens

SMALL = Dims()
NO_NATIVE = pytest.mark.skipif(native.unavailable_reason() is not None, reason="the extension is not there")
BACKENDS = pytest.mark.parametrize(
    ("ops", "dims"),
    [(reference, SMALL), pytest.param(native, Dims(k_dim=8, v_dim=40, size=16), marks=NO_NATIVE)],
    ids=["reference", "native"],
)


def slots_of(data, walk: Walk, length: int) -> torch.Tensor:
    """Any kept slots, the same for all layers or heads or not: [L | 1, K | 1, M] ascending."""
    layers = data.draw(st.sampled_from([1, walk.dims.layers]))
    heads = data.draw(st.sampled_from([1, walk.dims.heads]))
    count = data.draw(st.integers(1, length))
    noise = torch.rand(layers, heads, length, generator=torch.Generator().manual_seed(count))
    return noise.argsort(-1)[..., :count].sort(-1).values


def random_step(data, walk: Walk) -> None:
    live = list(walk.rows)
    long = [name for name in live if walk.rows[name].length > 1]
    room = walk.max_seqs - len(live)
    kinds = ["write"] * 4 * bool(live) + ["begin"] * (room > 0) + ["fork", "fork"] * (room > 0 and bool(long))
    kinds += ["end"] * (len(live) > 1) + ["compact"] * 2 * bool(long)
    kind = data.draw(st.sampled_from(kinds))
    if kind == "begin":
        walk.write({walk.begin(): data.draw(st.integers(1, 3 * walk.dims.size))})
    elif kind == "fork":
        walk.fork(data.draw(st.sampled_from(long)))
    elif kind == "end":
        walk.end(data.draw(st.sampled_from(live)))
    elif kind == "compact":
        name = data.draw(st.sampled_from(long))
        walk.compact(name, slots_of(data, walk, walk.rows[name].length))
    else:
        names = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
        failures = data.draw(st.sampled_from([(), (), (0,), (1,), (2, 1)]))
        counts = st.sampled_from([1, 1, walk.dims.size - 1, walk.dims.size + 2])
        walk.write({name: data.draw(counts) for name in names}, failures=failures)


@BACKENDS
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_random_walk_reads_what_its_shadow_holds(ops, dims, data) -> None:
    walk = Walk(ops, dims, num_blocks=80)
    for _ in range(data.draw(st.integers(3, 14))):
        random_step(data, walk)
        walk.check()
        assert walk.cache.open is not None
        assert len(walk.cache.open.blocks) <= 2 * walk.max_seqs
    walk.keep_open([])
    tails = {row.blocks[-1] for row in walk.rows.values() if row.length % dims.size}
    assert walk.cache.open.blocks == tails


@BACKENDS
def test_forks_that_both_go_on_after_a_pass_that_failed(ops, dims) -> None:
    """The second sequence seals the shared block in one layer; the first one's copy is still open there."""
    walk, size = Walk(ops, dims), dims.size
    first = walk.begin()
    walk.write({first: size + 2})
    second = walk.fork(first)
    walk.write({first: 1, second: size - 1}, failures=(1, 2))
    walk.check()
    walk.write({first: size, second: 1})
    walk.check()


@BACKENDS
def test_a_copied_tail_outlives_the_sequence_it_was_copied_from(ops, dims) -> None:
    """The fork is preempted in the very step that copies its block; then the pass fails after copying, and
    each sequence is tried alone."""
    walk, size = Walk(ops, dims), dims.size
    first, other = walk.begin(), walk.begin()
    walk.write({first: size + 2, other: size - 1})
    fork = walk.fork(first)
    walk.write({other: 2, first: 1}, ended=(fork,), failures=(0, 1), alone=True)
    walk.check()
    walk.write({other: 1, first: 1})
    walk.check()


def test_a_write_that_begins_in_the_middle_of_a_sealed_block_is_refused() -> None:
    walk = Walk(reference, SMALL)
    name = walk.begin()
    walk.write({name: 8})
    walk.keep_open([])
    k, v = torch.randn(1, 2, 6), torch.randn(1, 2, 10)
    with pytest.raises(AssertionError, match="has no open row"):
        reference.write_kv(walk.cache.layers[0], k, v, torch.tensor([walk.rows[name].blocks[0] * 4 + 2]))


def test_more_open_blocks_than_rows_is_said_with_numbers() -> None:
    walk = Walk(reference, SMALL, max_seqs=1)
    names = [walk.begin() for _ in range(3)]
    with pytest.raises(AssertionError, match=r"0 of 2 rows hold open blocks, and 3 more are needed"):
        walk.write(dict.fromkeys(names, 1))


def test_a_cache_without_rows_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="open_rows is 0"):
        reference.allocate(SMALL.facts, 4, 4, like=torch.empty(0), kv_format=KIVI)


@BACKENDS
@pytest.mark.parametrize("chunk", [1, 5, 7, 33])
def test_bytes_do_not_depend_on_how_tokens_were_cut_into_writes(ops, dims, chunk) -> None:
    """Nor on their order within a write: codes are of the numbers in bf16, whoever rounded them."""
    count, size = 2 * dims.size + 3, dims.size
    k = torch.randn(count, dims.heads, dims.k_dim, generator=torch.Generator().manual_seed(1))
    v = torch.randn(count, dims.heads, dims.v_dim, generator=torch.Generator().manual_seed(2))
    slots = torch.cat([torch.arange(size) + block * size for block in (3, 1, 4)])[:count]
    found = []
    for step in (count, chunk):
        walk = Walk(ops, dims)
        for first in range(0, count, step):
            part = (
                torch.randperm(min(step, count - first), generator=torch.Generator().manual_seed(3)) + first
            )
            for layer in range(dims.layers):
                ops.write_kv(walk.cache.layers[layer], k[part], v[part], slots[part])
        assert walk.cache.open is not None
        row = int(walk.cache.open.row_of[4])
        found.append([plane[:, [1, 3]] for plane in walk.cache.planes] + [walk.cache.open.k[row]])
    for whole, cut in zip(*found, strict=True):
        assert torch.equal(whole, cut)
        assert whole.any()


@BACKENDS
def test_full_blocks_keep_every_byte_until_they_are_freed(ops, dims) -> None:
    """Whatever happens to sequences that share them."""
    walk, size = Walk(ops, dims), dims.size
    first = walk.begin()
    walk.write({first: 2 * size + 1})
    fork = walk.fork(first)
    full = walk.rows[first].blocks[:2]
    before = [plane[:, full].clone() for plane in walk.cache.planes]
    walk.write({first: 2 * size - 1, fork: 2})
    walk.compact(fork, torch.tensor([[[0, 1, 2, size + 1, 2 * size + 1]]]))
    walk.write({fork: 3, first: 1})
    walk.end(fork)
    walk.check()
    for plane, was in zip(walk.cache.planes, before, strict=True):
        assert torch.equal(plane[:, full], was)


def test_repeated_compaction_adds_no_error_to_what_has_moved_once() -> None:
    walk = Walk(reference, Dims(k_dim=32, v_dim=40))
    name = walk.begin()
    walk.write({name: 24})
    walk.compact(name, torch.arange(1, 21)[None, None])
    k, v = walk.rows[name].k.clone(), walk.rows[name].v.clone()
    for lost in range(4):
        walk.write({name: 4})
        walk.compact(name, torch.cat((torch.arange(0, 16 - 4 * lost), torch.arange(20, 24)))[None, None])
        count = 16 - 4 * lost
        assert torch.equal(walk.rows[name].k[:, :, :count], k[:, :, :count])
        assert torch.equal(walk.rows[name].v[:, :, :count], v[:, :, :count])
        walk.write({name: 20 - walk.rows[name].length})


@BACKENDS
def test_heads_that_keep_unequal_numbers_take_cells_of_the_open_block(ops, dims) -> None:
    """As the engine moves heads one by one: a cell of the block that is being filled is read from its row
    until its own head has moved, whatever other cells of that block hold by then."""
    walk, size = Walk(ops, dims), dims.size
    name, length = walk.begin(), 3 * dims.size + 3
    walk.write({name: length})
    row, view = walk.rows[name], cell_view(walk.cache)
    present = natural_cells(walk.cache, np.array(row.blocks))
    wanted, held = np.array([[3, 1], [1, 3]]), np.full((2, 2), 4)
    targets = np.array([row.blocks[0], row.blocks[3]])
    cells, order = assign_cells(present, held, wanted, natural_cells(walk.cache, targets))
    kept = {at: torch.arange(length)[-size * int(wanted[at]) :] for at in order}
    for at in order:
        source, target = ids(present[at]), ids(cells[at][: wanted[at]])
        k, v = ops.gather_tokens(PagedTokens(view.layers[0], source, length))
        assert torch.equal(k[0], row.k[at])
        assert torch.equal(v[0], row.v[at])
        ops.compact(view, kept[at][None, None], source, target)
    for at in order:
        slots = kept[at]
        target = ids(cells[at][: wanted[at]])
        k, v = ops.gather_tokens(PagedTokens(view.layers[0], target, len(slots)))
        old_k, old_v, full = row.k[at][slots], row.v[at][slots], slots < 3 * size
        assert ((k[0] - old_k).abs() <= key_steps(old_k)).all()
        assert torch.equal(v[0][full], old_v[full])
        assert ((v[0] - old_v).abs() <= value_steps(old_v)).all()


def ids(cells: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(cells.astype(np.int64))


def test_a_latent_cache_keeps_the_rotary_key_by_channel() -> None:
    """A key is its value followed by the stored dims; both come back as one."""
    facts = LayerFacts(4, 1, head_dim=10 + 6, v_head_dim=10, softmax=Softmax(1.0), latent=True)
    like = torch.empty(0)
    cache = reference.allocate((facts,), 8, 4, like=like, kv_format=KIVI, open_rows=2)
    v = torch.randn(6, 1, 10)
    k = torch.cat((v, torch.randn(6, 1, 6) + 3), -1)
    reference.write_kv(cache.layers[0], k, v, torch.arange(8, 14))
    got_k, got_v = reference.gather_tokens(PagedTokens(cache.layers[0], torch.tensor([2, 3]), 6))
    assert torch.equal(got_k[..., :10], got_v)
    assert torch.equal(got_k[0, 4:], k[4:, 0].bfloat16().float())
    step = half_step(k[:4, 0, 10:].bfloat16().float(), 0, 40.5, 2.0**-10)
    assert ((got_k[0, :4, 10:] - k[:4, 0, 10:].bfloat16().float()).abs() <= step).all()
