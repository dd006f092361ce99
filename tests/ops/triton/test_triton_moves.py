"""Writing, copying, gathering and compacting leave the bytes that the reference leaves, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from format_cases import random_kept
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import Shape, empty_cache, noise
from torch import Tensor
from triton_pair import DEVICE, DTYPES, Pair, make_pair, on_device

from kvreclaim.ops import reference
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.triton import writes

SHAPES = [
    Shape(kv_heads=2, dim=32, layers=2),
    Shape(kv_heads=3, dim=80, v_dim=24, block_size=8, layers=2),
    Shape(kv_heads=1, dim=4, v_dim=6, block_size=3, layers=2),
]
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=["even", "odd", "small"])


def filled_pair(shape: Shape, num_blocks: int) -> tuple[KVCache, KVCache]:
    """A cache of noise for the kernels and its copy for the reference."""
    cache = empty_cache(shape, num_blocks)
    for part, x in enumerate((cache.k, cache.v)):
        x.copy_(noise(part, *x.shape))
    return on_device(cache), cache


def assert_same(got: KVCache, want: KVCache) -> None:
    """Bit for bit, in every block."""
    for x, y in ((got.k, want.k), (got.v, want.v)):
        torch.testing.assert_close(x.cpu(), y, atol=0, rtol=0, equal_nan=True)


@DTYPES
@ALL_SHAPES
@pytest.mark.parametrize("given_dtype", [torch.float32, torch.bfloat16], ids=["from_fp32", "from_bf16"])
def test_write_kv(shape: Shape, dtype: torch.dtype, given_dtype: torch.dtype) -> None:
    """Strided keys and values, rounded as torch does, into scattered slots of one layer."""
    ours, plain = filled_pair(replace(shape, dtype=dtype), 4)
    slots = torch.randperm(4 * shape.block_size, generator=torch.Generator().manual_seed(3))[:7]
    k = noise(1, shape.kv_heads, 7, shape.dim, dtype=given_dtype).transpose(0, 1)
    v = noise(2, 7, shape.kv_heads, 2 * plain.v_head_dim, dtype=given_dtype)[..., ::2]
    reference.write_kv(plain.layers[1], k, v, slots)
    kernels.write_kv(ours.layers[1], k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE))
    assert_same(ours, plain)


def test_a_token_without_a_slot_is_written_nowhere() -> None:
    ours, plain = filled_pair(SHAPES[0], 3)
    k, v = noise(1, 3, 2, 32), noise(2, 3, 2, 32)
    reference.write_kv(plain.layers[0], k[1:2], v[1:2], torch.tensor([5]))
    kernels.write_kv(ours.layers[0], k.to(DEVICE), v.to(DEVICE), torch.tensor([-1, 5, -1], device=DEVICE))
    assert_same(ours, plain)


@pytest.mark.parametrize("shape", SHAPES, ids=["even", "odd", "small"])
def test_writing_no_token(shape: Shape) -> None:
    ours, plain = filled_pair(shape, 2)
    nothing = torch.zeros(0, shape.kv_heads, shape.dim), torch.zeros(0, shape.kv_heads, plain.v_head_dim)
    kernels.write_kv(ours.layers[0], *(x.to(DEVICE) for x in nothing), torch.zeros(0, dtype=torch.int64))
    assert_same(ours, plain)


@DTYPES
@ALL_SHAPES
@pytest.mark.parametrize("pairs", [[(1, 4), (3, 0)], [(1, 4), (3, 1), (4, 2)]], ids=["apart", "a chain"])
def test_copy_blocks(shape: Shape, dtype: torch.dtype, pairs: list[tuple[int, int]]) -> None:
    ours, plain = filled_pair(replace(shape, dtype=dtype), 6)
    reference.copy_blocks(plain, pairs)
    kernels.copy_blocks(ours, pairs)
    assert_same(ours, plain)


def test_prepare_blocks_has_nothing_to_do() -> None:
    """No kernel loads a slot that is not attended or kept: the other tests keep NaN in them."""
    ours, plain = filled_pair(SHAPES[0], 3)
    kernels.prepare_blocks(ours, [0, 2])
    assert_same(ours, plain)


@DTYPES
@ALL_SHAPES
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 40])
def test_gather_tokens(shape: Shape, num_tokens: int, dtype: torch.dtype) -> None:
    pair = make_pair(replace(shape, dtype=dtype), 40)
    got = kernels.gather_tokens(PagedTokens(pair.kernel.layers[1], pair.device_ids, num_tokens))
    want = reference.gather_tokens(PagedTokens(pair.reference.layers[1], pair.block_ids, num_tokens))
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x.cpu(), y)


def assert_compacts(ours: KVCache, plain: KVCache, kept: Tensor, source: Tensor, target: Tensor) -> None:
    reference.compact(plain, kept, source, target)
    kernels.compact(ours, kept.to(DEVICE), source.to(DEVICE), target.to(DEVICE))
    assert_same(ours, plain)


def assert_pair_compacts(pair: Pair, kept: Tensor, target: Tensor) -> None:
    """Only the sequence's live slots may be read: past its end the kernels' copy holds NaN."""
    reference.compact(pair.reference, kept, pair.block_ids, target)
    kernels.compact(pair.kernel, kept.to(DEVICE), pair.device_ids, target.to(DEVICE))
    for x, y in ((pair.kernel.k, pair.reference.k), (pair.kernel.v, pair.reference.v)):
        assert torch.equal(x[:, target].cpu(), y[:, target])


@DTYPES
@pytest.mark.parametrize("per", [(1, 1), (1, 2), (2, 1), (2, 2)], ids=["union", "head", "layer", "each"])
@pytest.mark.parametrize("count", [0, 1, 16, 17, 200])
def test_compact_in_place(count: int, per: tuple[int, int], dtype: torch.dtype) -> None:
    """Into the first blocks of the sequence's own table."""
    pair = make_pair(Shape(kv_heads=2, dim=32, v_dim=24, layers=2, dtype=dtype), 200)
    assert_pair_compacts(pair, random_kept(per, 200, count), pair.block_ids[: -(-count // 16)])


@DTYPES
@pytest.mark.parametrize("step", [-1, 1], ids=["backwards", "later"])
def test_compact_into_blocks_that_are_still_to_be_read(step: int, dtype: torch.dtype) -> None:
    """The last blocks of the old table, in reverse or in order."""
    pair = make_pair(Shape(kv_heads=2, dim=32, layers=2, dtype=dtype), 300)
    target = pair.block_ids[-8:] if step == 1 else pair.block_ids.flip(0)[:8]
    assert_pair_compacts(pair, random_kept((2, 2), 300, 123), target)


@pytest.mark.parametrize("dims", [(64, 96), (80, 80), (128, 32), (256, 256)])
@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_compact_of_every_dim(dims: tuple[int, int], block_size: int) -> None:
    pair = make_pair(Shape(kv_heads=1, dim=dims[0], v_dim=dims[1], block_size=block_size), 90)
    target = pair.block_ids[: -(-40 // block_size)]
    assert_pair_compacts(pair, random_kept((1, 1), 90, 40), target)


@pytest.mark.parametrize("layers_at_once", [1, 2, 9])
def test_layers_move_a_few_at_a_time(layers_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "ROOM_BYTES", layers_at_once * 5 * 64 * 8 * 4)
    pair = make_pair(Shape(kv_heads=5, dim=8, layers=5), 100)
    assert_pair_compacts(pair, random_kept((5, 5), 100, 50), pair.block_ids.flip(0)[:4])


@st.composite
def compactions(draw):
    """Any survivors into any mixture of the sequence's own blocks, in any order, and others."""
    size, num_source = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_tokens = draw(st.integers((num_source - 1) * size + 1, num_source * size))
    num_kept = draw(st.integers(1, num_tokens))
    layers, heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    blocks = draw(st.permutations(range(8)))
    target = draw(st.permutations(blocks))[: -(-num_kept // size)]
    kept = random_kept((layers, heads), num_tokens, num_kept, draw(st.integers(0, 999)))
    return size, torch.tensor(blocks[:num_source]), torch.tensor(target), kept


@given(compactions())
@settings(max_examples=15, deadline=None)
def test_compact_from_any_table_to_any(case) -> None:
    size, source, target, kept = case
    shape = Shape(kv_heads=2, dim=4, v_dim=6, block_size=size, layers=2)
    assert_compacts(*filled_pair(shape, 8), kept, source, target)
