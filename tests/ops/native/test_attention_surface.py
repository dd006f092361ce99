"""Writing and gathering K/V, refusals, and what the back-end says about itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from twins import Ask, Shape, nan_cache, noise, twins

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import native, reference
from kvreclaim.ops.backend import Need
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.formats import plain_format
from kvreclaim.ops.kv_cache import PagedTokens

pytestmark = pytest.mark.usefixtures("isa")
SHAPES = [Shape(dim=32), Shape(kv_heads=3, dim=80, v_dim=24, block_size=32), Shape(kv_heads=1, dim=8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=["from_fp32", "from_bf16"])
@pytest.mark.parametrize("tokens", [1, 5, 16, 53])
def test_what_is_written_is_gathered(
    shape: Shape, cached: torch.dtype, given: torch.dtype, tokens: int, threads: int
) -> None:
    """Strided keys and values; rounding as torch's; nothing else is touched."""
    shape = replace(shape, layers=2, dtype=cached)
    caches = nan_cache(reference, shape, 6), nan_cache(native, shape, 6)
    k = noise(1, shape.kv_heads, tokens, shape.dim, dtype=given).transpose(0, 1)
    v = noise(2, tokens, shape.kv_heads, 2 * shape.value_dim, dtype=given)[..., ::2]
    slots = torch.randperm(6 * shape.block_size, generator=torch.Generator().manual_seed(3))[:tokens]
    for module, cache in zip((reference, native), caches, strict=True):
        module.write_kv(cache.layers[1], k, v, slots)
    everything = torch.arange(6)
    for layer in range(2):
        want = reference.gather_tokens(PagedTokens(caches[0].layers[layer], everything, 6 * shape.block_size))
        got = native.gather_tokens(PagedTokens(caches[1].layers[layer], everything, 6 * shape.block_size))
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x.nan_to_num(123.0), y.nan_to_num(123.0))


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 40])
def test_gathers_a_part_of_the_blocks(tokens: int) -> None:
    w = twins(Shape(dtype=torch.bfloat16), [Ask(1, 40)])
    ids = torch.from_numpy(w.batch.sequences[0].block_ids).long()
    got = native.gather_tokens(PagedTokens(w.native.layers[0], ids, tokens))
    for x, y in zip(
        got, reference.gather_tokens(PagedTokens(w.reference.layers[0], ids, tokens)), strict=True
    ):
        assert torch.equal(x, y)


def test_bf16_rounds_as_torch_does() -> None:
    """Ties to even, the largest numbers to infinity, infinities and NaN kept."""
    odd = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, torch.inf, -torch.inf, torch.nan, 1e-40])
    shape = Shape(kv_heads=1, dim=8, dtype=torch.bfloat16)
    cache = native.allocate(shape.facts(), 1, 16, like=torch.empty(0, dtype=torch.bfloat16))
    native.write_kv(cache.layers[0], odd.view(1, 1, 8), odd.view(1, 1, 8), torch.tensor([3]))
    k, v = native.gather_tokens(PagedTokens(cache.layers[0], torch.tensor([0]), 4))
    for x in (k, v):
        torch.testing.assert_close(x[0, 3], odd.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_copies_whole_blocks() -> None:
    w = twins(Shape(layers=2, dtype=torch.bfloat16), [Ask(1, 40)])
    ids = torch.from_numpy(w.batch.sequences[0].block_ids).long()
    free = next(b for b in range(w.native.num_blocks) if b not in ids)
    native.copy_blocks(w.native, [(int(ids[1]), free)])
    for layer in range(2):
        for x in (w.native.k[layer], w.native.v[layer]):
            assert torch.equal(x[free], x[ids[1]])


def test_a_new_cache_is_zero() -> None:
    shape = Shape(layers=2, dim=40, v_dim=24, dtype=torch.bfloat16)
    cache = native.allocate(shape.facts(), 5, 32, like=torch.empty(0, dtype=torch.bfloat16))
    assert (cache.num_layers, cache.num_blocks, cache.num_kv_heads) == (2, 5, 2)
    assert (cache.block_size, cache.head_dim, cache.v_head_dim) == (32, 40, 24)
    assert not cache.k.any()
    assert not cache.v.any()


@pytest.mark.parametrize(
    ("shape", "device", "words"),
    [
        (Shape(block_size=8), "cpu", "block size 8"),
        (Shape(dim=12), "cpu", "head dims"),
        (Shape(dtype=torch.float64), "cpu", "float64"),
        (Shape(), "cuda", "cuda"),
    ],
)
def test_says_what_it_cannot_serve(shape: Shape, device: str, words: str) -> None:
    reason = native.unsupported_reason(
        Need(shape.facts(), shape.block_size, shape.dtype, torch.device(device), plain_format(torch.float32))
    )
    assert reason is not None
    assert words in reason


def test_serves_the_rest(isa: str) -> None:
    shape = Shape(dim=80, dtype=torch.bfloat16)
    assert (
        native.unsupported_reason(
            Need(shape.facts(), 16, shape.dtype, torch.device("cpu"), plain_format(shape.dtype))
        )
        is None
    )
    assert isa in native.describe()


def test_refuses_an_unknown_instruction_set() -> None:
    with pytest.raises(InvalidArgumentError, match=r"instruction set is 'mmx'.*choose one"):
        native.force_isa("mmx")


def test_a_slot_outside_the_cache_is_refused() -> None:
    cache = nan_cache(native, Shape(), 2)
    x = noise(1, 1, 2, 64)
    for slot in (-1, 32):
        with pytest.raises(ValueError, match="outside the cache"):
            native.write_kv(cache.layers[0], x, x, torch.tensor([slot]))


def test_wrong_shapes_are_refused() -> None:
    w = twins(Shape(), [Ask(1, 40)])
    with pytest.raises(ValueError, match="shape"):
        native.paged_attention(w.q[..., :32], w.native.layers[0], w.batch)
    with pytest.raises(ValueError, match="no multiple of the KV heads"):
        native.paged_attention(w.q[:, :7], w.native.layers[0], w.batch)
    with pytest.raises(ValueError, match="fewer rows"):
        native.paged_attention(w.q[:0], w.native.layers[0], w.batch)
    with pytest.raises(IndexError, match="layer"):
        native.paged_attention(w.q, replace(w.native.layers[0], index=1), w.batch)
    short = replace(w.batch.sequences[0], seq_len=100)
    batch = AttentionBatch((short,), w.batch.slot_mapping, 16)
    with pytest.raises(ValueError, match="too few blocks"):
        native.paged_attention(w.q, w.native.layers[0], batch)
