"""Decode over coded formats by integer products, and over fp8 by those of bf16, where a CPU has them: what
queries and weights of 16 bits could get wrong, against fp64 over what gather_tokens returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_oracle import noise, under
from torch import Tensor

from kvreclaim.ops import native
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import KVCache, PagedTokens

SLACK = 2e-4
"""Tolerance, relative to the largest value."""

names = pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4"])


def cached(name: str, k: Tensor, v: Tensor) -> tuple[KVCache, AttentionBatch]:
    """One sequence, keys [T, K, D], in blocks in falling order."""
    count, heads, dim = k.shape
    blocks = -(-count // 16)
    facts = LayerFacts(heads, heads, dim, v.shape[-1], Softmax(1.0))
    like = torch.empty(0, dtype=torch.bfloat16)
    cache = native.allocate((facts,), blocks + 1, 16, like=like, kv_format=FORMATS[name])
    table = np.arange(blocks, 0, -1, dtype=np.int32)
    slots = torch.arange(count)
    mapping = torch.from_numpy(table.astype(np.int64))[slots // 16] * 16 + slots % 16
    native.write_kv(cache.layers[0], k, v, mapping)
    batch = AttentionBatch.build((SequenceSlots(table, 1, count),), 16, torch.device("cpu"))
    return cache, batch


def attend(cache: KVCache, batch: AttentionBatch, q: Tensor) -> Tensor:
    return native.paged_attention(q, under(cache, 0, scale=1.0), batch)


def check(cache: KVCache, batch: AttentionBatch, q: Tensor) -> None:
    table = torch.from_numpy(batch.sequences[0].block_ids.astype(np.int64))
    k, v = native.gather_tokens(PagedTokens(cache.layers[0], table, batch.sequences[0].seq_len))
    members = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(members, 0) for x in (k, v))
    weights = (k @ q[0].double()[..., None])[..., 0].softmax(-1)
    want = (weights[:, None] @ v)[:, 0]
    got = attend(cache, batch, q)[0].double()
    assert ((got - want).abs() <= 2**-8 * want.abs() + SLACK * v.abs().max()).all()


@names
@pytest.mark.parametrize(
    ("heads", "group", "dim", "v_dim"), [(1, 17, 256, 64), (2, 2, 96, 160), (1, 5, 32, 256), (1, 4, 48, 64)]
)
def test_wide_heads_and_many_of_them(
    isa: str, name: str, heads: int, group: int, dim: int, v_dim: int
) -> None:
    k, v = noise(1, 83, heads, dim), noise(2, 83, heads, v_dim)
    q = (noise(3, 1, heads * group, dim) * dim**-0.5).bfloat16()
    check(*cached(name, k, v), q)


@names
def test_one_weight_above_thousands_of_small_ones(isa: str, name: str) -> None:
    """Each of 4,000 weights is 2^-13 of the largest, all together they are a third of the sum."""
    k, v = torch.zeros(4001, 1, 32), noise(1, 4001, 1, 32) + 1
    k[0] = 1.0
    q = torch.full((1, 2, 32), 9.0 / 32).bfloat16()
    check(*cached(name, k, v), q)


@names
def test_tokens_of_very_different_size(isa: str, name: str) -> None:
    """A value a hundred times as large as its neighbours takes the bound of a tile's scales with it."""
    k, v = noise(1, 150, 2, 64), noise(2, 150, 2, 64)
    v[70] *= 100
    k[20] *= 8
    check(*cached(name, k, v), (noise(3, 1, 8, 64) / 8).bfloat16())


@names
def test_nothing_but_zeros(isa: str, name: str) -> None:
    k, v = noise(1, 40, 1, 32), noise(2, 40, 1, 32)
    check(*cached(name, k, v), torch.zeros(1, 4, 32, dtype=torch.bfloat16))
    cache, batch = cached(name, torch.zeros(40, 1, 32), torch.zeros(40, 1, 32))
    assert not attend(cache, batch, noise(3, 1, 4, 32).bfloat16()).any()


@names
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_a_query_that_is_not_finite_spoils_its_own_head_only(isa: str, name: str, what: float) -> None:
    cache, batch = cached(name, noise(1, 100, 2, 32), noise(2, 100, 2, 32))
    q = noise(3, 1, 8, 32).bfloat16()
    clean = attend(cache, batch, q)
    q[0, 2, 5] = what
    got = attend(cache, batch, q)
    assert not got[0, 2].isfinite().any()
    others = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(got[0, others], clean[0, others])


@names
@pytest.mark.parametrize("size", [200.0, 1e4, 4e4])
def test_logits_so_large_that_rounding_differs(isa: str, name: str, size: float) -> None:
    """Equal keys weigh the same, however their products are rounded: no weight may overflow."""
    v = noise(2, 83, 1, 64)
    check(*cached(name, torch.full((83, 1, 64), 97.0), v), torch.full((1, 4, 64), size).bfloat16())


@names
def test_numbers_of_every_size(isa: str, name: str) -> None:
    """From a token's largest number down to 2^-18 of it: fp8's small ones have no leading bit."""
    k, v = noise(1, 83, 2, 64), noise(2, 83, 2, 64)
    sizes = 2.0 ** -torch.arange(64).remainder(19)
    q = noise(3, 1, 8, 64) / 8 / sizes.clamp_min(1e-2)
    check(*cached(name, k * sizes, v * sizes.flip(0)), q.bfloat16())
