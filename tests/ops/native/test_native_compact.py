"""Compaction in place leaves in the new table what the reference leaves there, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from format_cases import random_kept
from hypothesis import given, settings
from hypothesis import strategies as st
from native_pair import DTYPES, Dims, Pair, from_native, make_pair
from torch import Tensor

from kvreclaim.ops import native, reference


def assert_compacts(pair: Pair, kept: Tensor, target_ids: Tensor) -> None:
    size, count = pair.native.block_size, kept.shape[-1]
    untouched = torch.ones(pair.native.num_blocks, dtype=torch.bool)
    untouched[target_ids] = False
    before = pair.native.k[:, untouched].clone(), pair.native.v[:, untouched].clone()
    reference.compact(pair.reference, kept, pair.block_ids, target_ids)
    native.compact(pair.native, kept, pair.block_ids, target_ids)
    slots = torch.arange(count)
    block, offset = target_ids[slots // size], slots % size
    for got, want in ((from_native(pair.native.k), pair.reference.k), (pair.native.v, pair.reference.v)):
        assert torch.equal(got[:, block, :, offset], want[:, block, :, offset])
    for got, want in zip((pair.native.k[:, untouched], pair.native.v[:, untouched]), before, strict=True):
        assert torch.equal(got.nan_to_num(77.0), want.nan_to_num(77.0))


def blocks_for(pair: Pair, count: int) -> int:
    return -(-count // pair.native.block_size)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 3)], ids=["union", "head", "layer", "each"])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 47, 160, 187, 200])
def test_shares_of_kept_slots(count: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    pair = make_pair(Dims(kv_heads=3, dtype=dtype), 200)
    assert_compacts(pair, random_kept(shape, 200, count), pair.block_ids[: blocks_for(pair, count)])


@DTYPES
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dim", [(32, 32), (64, 96), (80, 80), (96, 64), (128, 128), (256, 256), (8, 72)])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_dims_and_block_sizes(dim: tuple[int, int], block_size: int, dtype: torch.dtype) -> None:
    pair = make_pair(Dims(dim=dim[0], v_dim=dim[1], block_size=block_size, dtype=dtype), 333)
    assert_compacts(pair, random_kept((2, 2), 333, 150), pair.block_ids[: blocks_for(pair, 150)])


@DTYPES
@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("count", [30, 500, 940])
def test_on_threads(count: int, dtype: torch.dtype) -> None:
    pair = make_pair(Dims(dim=32, v_dim=40, block_size=32, dtype=dtype), 1000)
    kept = random_kept((2, 2), 1000, count)
    assert_compacts(pair, kept, pair.block_ids[: blocks_for(pair, count)])


@pytest.mark.parametrize("first", [0, 1, 16, 63, 150])
def test_tokens_that_stay_are_not_touched(first: int) -> None:
    """A prefix that is kept whole; its blocks keep their bytes, past the last kept slot too."""
    pair = make_pair(Dims(), 200)
    kept = torch.cat([torch.arange(first), torch.arange(first + 1, 200, 2)])
    before = pair.native.k.clone()
    assert_compacts(pair, kept.expand(1, 1, -1), pair.block_ids[: blocks_for(pair, kept.numel())])
    whole = pair.block_ids[: first // 16]
    assert torch.equal(pair.native.k[:, whole], before[:, whole])


@DTYPES
@pytest.mark.parametrize("foreign", [1, 2, 3])
def test_first_targets_redirected(foreign: int, dtype: torch.dtype) -> None:
    pair = make_pair(Dims(dtype=dtype), 200, spare=3)
    free = torch.tensor([b for b in range(pair.native.num_blocks) if b not in pair.block_ids])
    target = torch.cat([free[:foreign], pair.block_ids[foreign : blocks_for(pair, 120)]])
    assert_compacts(pair, random_kept((2, 2), 200, 120), target)


@DTYPES
@pytest.mark.parametrize("order", ["reversed", "rotated", "swapped", "late"])
@pytest.mark.parametrize("count", [33, 120, 200])
@pytest.mark.usefixtures("isa", "threads")
def test_targets_that_are_needed_later(order: str, count: int, dtype: torch.dtype) -> None:
    pair = make_pair(Dims(dtype=dtype), 200)
    ids = pair.block_ids
    orders = {
        "reversed": ids.flip(0),
        "rotated": ids.roll(1),
        "swapped": ids.view(-1)[
            torch.arange(ids.numel()) ^ 1 if ids.numel() % 2 == 0 else torch.arange(ids.numel())
        ],
        "late": ids.roll(-2),
    }
    target = orders[order][: blocks_for(pair, count)]
    assert_compacts(pair, random_kept((2, 1), 200, count), target)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_tables_and_slots(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 130))
    count = data.draw(st.integers(0, num_tokens))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    block_size = data.draw(st.sampled_from([16, 32]))
    seed = data.draw(st.integers(0, 99))
    dims = Dims(dim=8, v_dim=16, block_size=block_size, dtype=dtype)
    pair = make_pair(dims, num_tokens, spare=2, seed=seed)
    shape = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    target = data.draw(st.permutations(range(pair.native.num_blocks)))[: blocks_for(pair, count)]
    if data.draw(st.booleans()):
        target = pair.block_ids[: len(target)].tolist()
    assert_compacts(
        pair, random_kept(shape, num_tokens, count, seed), torch.tensor(target, dtype=torch.int64)
    )


def test_refuses_before_anything_moves() -> None:
    pair = make_pair(Dims(), 40)
    before = pair.native.v.clone().nan_to_num(77.0)
    wrong = [
        (torch.tensor([[[3, 2, 5]]]), pair.block_ids, pair.block_ids, "ascend"),
        (torch.tensor([[[3, 3, 5]]]), pair.block_ids, pair.block_ids, "ascend"),
        (torch.tensor([[[-1, 3, 5]]]), pair.block_ids, pair.block_ids, "ascend"),
        (torch.tensor([[[1, 3, 48]]]), pair.block_ids, pair.block_ids, "ascend"),
        (torch.tensor([[[1, 3]]]), pair.block_ids + 9, pair.block_ids, "source_ids names a block outside"),
        (torch.tensor([[[1, 3]]]), pair.block_ids, pair.block_ids - 9, "target_ids names a block outside"),
        (torch.tensor([[[1, 3]]]), pair.block_ids, pair.block_ids[:0], "too few blocks"),
        (torch.tensor([[[1, 3]]] * 3), pair.block_ids, pair.block_ids, "neither one layer"),
        (torch.tensor([[[1, 3]] * 3]), pair.block_ids, pair.block_ids, "neither one KV head"),
    ]
    for kept, source, target, message in wrong:
        with pytest.raises(ValueError, match=message):
            native.compact(pair.native, kept, source, target)
    assert torch.equal(pair.native.v.nan_to_num(77.0), before)
