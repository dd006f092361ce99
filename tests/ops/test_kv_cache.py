"""Writing, moving, copying and clearing K/V bytes, against loops over single slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import Ask, Shape, assert_equal, empty_cache, expected, noise, put, under, world

from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import plain_format
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.reference import (
    compact,
    copy_blocks,
    gather_tokens,
    paged_attention,
    prepare_blocks,
    write_kv,
)

SHAPE = Shape(kv_heads=2, dim=4, v_dim=6, block_size=3, layers=2)


def filled_cache(shape: Shape, num_blocks: int, seed: int = 0) -> KVCache:
    """Every element is another number."""
    cache = empty_cache(shape, num_blocks)
    for part, x in enumerate((cache.k, cache.v)):
        x.copy_(noise(seed + part, *x.shape))
    return cache


def parts(cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.k, cache.v


def assert_same(cache: KVCache, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Bit for bit, in every block."""
    for x, y in zip(parts(cache), want, strict=True):
        torch.testing.assert_close(x, y, atol=0, rtol=0, equal_nan=True)


def test_a_new_cache_is_zero_and_has_the_layout_of_its_model() -> None:
    facts = LayerFacts(num_heads=6, num_kv_heads=3, head_dim=8, v_head_dim=5, softmax=Softmax(1.0))
    cache = reference.allocate((facts,) * 4, 7, 16, like=torch.empty(0, dtype=torch.bfloat16))
    assert cache.k.shape == (4, 7, 3, 16, 8)
    assert cache.v.shape == (4, 7, 3, 16, 5)
    assert cache.k.dtype == cache.v.dtype == torch.bfloat16
    assert not cache.k.any()
    assert not cache.v.any()
    assert (cache.num_blocks, cache.block_size) == (7, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_block_are_what_the_allocation_takes(dtype: torch.dtype) -> None:
    facts = LayerFacts(num_heads=6, num_kv_heads=3, head_dim=8, v_head_dim=5, softmax=Softmax(1.0))
    cache = reference.allocate((facts,) * 4, 7, 16, like=torch.empty(0, dtype=dtype))
    allocated = sum(x.untyped_storage().nbytes() for x in parts(cache))
    assert cache.bytes_per_block == plain_format(dtype).bytes_per_block((facts,) * 4, 16) == allocated // 7
    assert facts.group_size == 2


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_write_kv_writes_its_slots_and_no_other(data) -> None:
    size = data.draw(st.integers(1, 4))
    cache = empty_cache(replace(SHAPE, block_size=size), 5)
    slots = data.draw(st.lists(st.integers(0, 5 * size - 1), min_size=1, max_size=9, unique=True))
    k, v = noise(1, len(slots), 2, 4), noise(2, len(slots), 2, 6)
    want = tuple(x.clone() for x in parts(cache))
    for token, slot in enumerate(slots):
        for x, new in zip(want, (k, v), strict=True):
            x[1, slot // size, :, slot % size] = new[token]
    write_kv(cache.layers[1], k, v, torch.tensor(slots))
    assert_same(cache, want)


def test_write_kv_rounds_to_the_dtype_of_the_cache() -> None:
    cache = empty_cache(replace(SHAPE, dtype=torch.bfloat16), 2)
    k, v = noise(1, 1, 2, 4), noise(2, 1, 2, 6)
    write_kv(cache.layers[0], k, v, torch.tensor([4]))
    assert torch.equal(cache.k[0, 1, :, 1], k[0].bfloat16())
    assert torch.equal(cache.v[0, 1, :, 1], v[0].bfloat16())


def test_attention_reads_what_write_kv_wrote() -> None:
    """A sequence fed in three chunks, into scattered blocks that held NaN."""
    w = world(Shape(layers=2), [Ask(40, 40)])
    table = w.batch.sequences[0].block_ids
    cache = empty_cache(w.shape, w.cache.num_blocks)
    prepare_blocks(cache, table.tolist())
    outputs, first = [], 0
    for last in (17, 18, 40):
        slots = SequenceSlots(table, last - first, last)
        batch = AttentionBatch.build((slots,), 16, torch.device("cpu"))
        k, v = (x[0][1, :, first:last].transpose(0, 1) for x in (w.keys, w.values))
        write_kv(cache.layers[1], k, v, batch.slot_mapping)
        outputs.append(paged_attention(w.q[1, first:last], under(cache, 1, scale=0.25), batch))
        first = last
    assert_equal(torch.cat(outputs), expected(w, 1))
    assert not cache.k[0, table].any()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7])
def test_gather_tokens_is_the_inverse_of_laying_them(num_tokens: int) -> None:
    cache = empty_cache(SHAPE, 6)
    k, v = noise(1, 2, 2, num_tokens, 4), noise(2, 2, 2, num_tokens, 6)
    table = [4, 0, 5][: -(-num_tokens // 3)]
    put(cache, table, k, v)
    got = gather_tokens(PagedTokens(cache.layers[1], torch.tensor(table), num_tokens))[1]
    assert torch.equal(got, v[1])
    got.zero_()
    assert torch.equal(gather_tokens(PagedTokens(cache.layers[1], torch.tensor(table), num_tokens))[1], v[1])


@st.composite
def compactions(draw):
    """Any survivors, one choice for all or one for each layer or head, into any mixture of the
    sequence's own blocks, in any order, and others."""
    size, num_source = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_tokens = draw(st.integers((num_source - 1) * size + 1, num_source * size))
    num_kept = draw(st.integers(1, num_tokens))
    layers, heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    rank = noise(draw(st.integers(0, 999)), layers, heads, num_tokens).argsort(-1)
    blocks = draw(st.permutations(range(8)))
    source = blocks[:num_source]
    target = draw(st.permutations(blocks))[: -(-num_kept // size)]
    return size, source, target, rank[..., :num_kept].sort(-1).values


@given(compactions())
@settings(max_examples=150, deadline=None)
def test_compact_equals_moving_one_slot_at_a_time(case) -> None:
    size, source, target, kept = case
    cache = filled_cache(replace(SHAPE, block_size=size), 8)
    before = tuple(x.clone() for x in parts(cache))
    want = tuple(x.clone() for x in before)
    for x, old in zip(want, before, strict=True):
        x[:, target] = 0
        for layer in range(2):
            for head in range(2):
                slots = kept[layer % kept.shape[0], head % kept.shape[1]].tolist()
                for i, slot in enumerate(slots):
                    moved = old[layer, source[slot // size], head, slot % size]
                    x[layer, target[i // size], head, i % size] = moved
    compact(cache, kept, torch.tensor(source), torch.tensor(target))
    assert_same(cache, want)


@pytest.mark.parametrize("window", [None, 9])
def test_attention_after_compaction_is_that_of_the_kept_tokens(window: int | None) -> None:
    """Each layer and head keeps other tokens; the next tokens come at their logical positions."""
    shape = Shape(layers=2, kv_heads=2, block_size=4)
    kept = noise(5, 2, 2, 38).argsort(-1)[..., :17].sort(-1).values
    w = world(shape, [Ask(3, 41)])
    source = torch.from_numpy(w.batch.sequences[0].block_ids)
    target = source[[3, 0, 7, 9, 8]]
    compact(w.cache, kept, source, target)
    slots = SequenceSlots(target.numpy(), 3, 20, shift=21, slot_positions=kept.to(torch.int32))
    batch = AttentionBatch.build((slots,), 4, torch.device("cpu"))
    left = torch.cat([kept, torch.arange(38, 41).expand(2, 2, 3)], -1)[..., None]
    keys, values = ([x.take_along_dim(left, 2)] for (x,) in (w.keys, w.values))
    asks = [Ask(3, 20, shift=21, slot_positions=slots.slot_positions)]
    survivors = replace(w, asks=asks, keys=keys, values=values)
    for layer in range(2):
        k, v = (x[0][layer, :, 38:].transpose(0, 1) for x in (w.keys, w.values))
        write_kv(w.cache.layers[layer], k, v, batch.slot_mapping)
        out = paged_attention(w.q[layer], under(w.cache, layer, scale=0.25, window=window), batch)
        assert_equal(out, expected(survivors, layer, window=window))


@pytest.mark.parametrize("pairs", [[(1, 4), (3, 0)], [(1, 4), (3, 1), (4, 2)]], ids=["apart", "a chain"])
def test_copy_blocks_copies_all_layers_and_nothing_else(pairs: list[tuple[int, int]]) -> None:
    cache = filled_cache(SHAPE, 6)
    want = tuple(x.clone() for x in parts(cache))
    for x, old in zip(want, parts(cache), strict=True):
        for source, target in pairs:
            x[:, target] = old[:, source]
    copy_blocks(cache, pairs)
    assert_same(cache, want)


def test_prepare_blocks_clears_nan_and_nothing_else() -> None:
    cache = filled_cache(SHAPE, 6)
    cache.k[:, 2], cache.v[:, 5] = torch.nan, torch.inf
    want = tuple(x.clone() for x in parts(cache))
    for x in want:
        x[:, [2, 5]] = 0
    prepare_blocks(cache, [5, 2])
    assert_same(cache, want)
