"""Attention of expanded keys, of absorbed queries and of the definition in float64 are the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from paged_oracle import noise
from torch import Tensor

from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.latent import MIN_QUERIES, PIECE, UpProjection, expanded_attention

NOPE, ROTARY, VALUE, RANK, HEADS, SCALE = 12, 8, 20, 24, 3, 0.3
V3 = UpProjection(torch.empty(1, 128, 512), torch.empty(1, 128, 512))
"""Dims of a head of DeepSeek-V3."""


@dataclass(frozen=True)
class World:
    """One sequence in the second of two layers, its last rows of queries, and the weights."""

    cache: KVCache
    tokens: PagedTokens
    query: Tensor
    weights: UpProjection

    @property
    def batch(self) -> AttentionBatch:
        ids = self.tokens.block_ids.numpy().astype(np.int32)
        slots = SequenceSlots(ids, len(self.query), self.tokens.num_tokens)
        return AttentionBatch.build((slots,), self.cache.block_size, torch.device("cpu"))

    def expanded(self) -> Tensor:
        return expanded_attention(reference, self.tokens, self.query, self.weights)

    def absorbed(self) -> Tensor:
        q = self.weights.absorb(self.query)
        out = reference.paged_attention(q, self.tokens.layer, self.batch)
        return self.weights.finish(out)

    def expected(self) -> Tensor:
        """[m, H, dv] float64: softmax(q k^T) v with the keys and values of every head."""
        keys, latents = (x[0].double() for x in reference.gather_tokens(self.tokens))
        w_uk, w_uv = self.weights.w_uk.double(), self.weights.w_uv.double()
        k = torch.cat(
            [torch.einsum("nr,hdr->hnd", latents, w_uk), keys[:, RANK:].expand(HEADS, -1, -1)], dim=-1
        )
        v = torch.einsum("nr,hdr->hnd", latents, w_uv)
        scores = torch.einsum("mhd,hnd->hmn", self.query.double(), k) * SCALE
        slots = torch.arange(self.tokens.num_tokens)
        hidden = slots > slots[-len(self.query) :, None]
        return torch.einsum("hmn,hnd->mhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def world(m: int, n: int, *, block_size=16, form="fp32", dtype=torch.float32, strided=False) -> World:
    layers = (LayerFacts(HEADS, 1, RANK + ROTARY, RANK, Softmax(SCALE), latent=True),) * 2
    count = -(-n // block_size)
    like = torch.empty(0, dtype=dtype)
    cache = reference.allocate(layers, count + 3, block_size, like=like, kv_format=FORMATS[form])
    table = 1 + torch.from_numpy(np.random.default_rng(n).permutation(count + 2)[:count])
    slots = torch.arange(n)
    mapping = table[slots // block_size] * block_size + slots % block_size
    keys = noise(n, n, 1, RANK + ROTARY, dtype=dtype)
    reference.write_kv(cache.layers[1], keys, keys[..., :RANK], mapping)
    both = noise(3, HEADS, NOPE + VALUE, RANK, dtype=dtype) / RANK**0.5
    weights = UpProjection(*both.split([NOPE, VALUE], dim=1))
    query = noise(m, HEADS, m, NOPE + ROTARY, dtype=dtype).transpose(0, 1)
    return World(
        cache, PagedTokens(cache.layers[1], table, n), query if strided else query.contiguous(), weights
    )


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(
    ("m", "n"),
    [(1, 1), (7, 7), (1, 40), (7, 530), (200, 200), (200, PIECE), (200, 1300), (PIECE + 90, 2 * PIECE + 70)],
)
def test_both_ways_are_the_definition(m, n, block_size) -> None:
    w = world(m, n, block_size=block_size, strided=m == 7)
    want = w.expected()
    for got in (w.expanded(), w.absorbed()):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_both_ways_read_what_the_format_kept(form) -> None:
    w = world(100, 700, form=form)
    for got in (w.expanded(), w.absorbed()):
        torch.testing.assert_close(got.double(), w.expected(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype) -> None:
    form = "bf16" if dtype == torch.bfloat16 else "fp16"
    w = world(60, 600, form=form, dtype=dtype)
    got = w.expanded()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), w.expected(), atol=1e-5, rtol=torch.finfo(dtype).eps)


def test_a_head_at_a_time_gives_the_same(monkeypatch) -> None:
    w = world(90, 700)
    together = w.expanded()
    monkeypatch.setattr("kvreclaim.ops.latent.MAX_SCORES", 1)
    torch.testing.assert_close(w.expanded(), together, atol=1e-6, rtol=1e-6)


def test_at_the_shape_of_v3() -> None:
    """At 128 + 64 and 128 dims of 4 heads over latents of 512."""
    weights = UpProjection(*(noise(5, 4, 256, 512) / 512**0.5).split([128, 128], dim=1))
    keys, query = noise(6, 300, 576), noise(7, 300, 4, 192)
    k, v = (x.transpose(0, 1) for x in weights.expand(keys[:, :512], keys[:, 512:]))
    expanded = reference.causal_attention(query, k, v, Softmax(192**-0.5))
    latents = keys[:, None]
    absorbed = reference.causal_attention(
        weights.absorb(query), latents, latents[..., :512], Softmax(192**-0.5)
    )
    assert (weights.finish(absorbed) - expanded).abs().max() < 1e-4


def cost(m: int, n: int, rank: int, nope: int, rotary: int, value: int) -> tuple[int, int]:
    """Multiplications per head, absorbed and expanded, counted one query and one key at a time."""
    pairs = sum(n - m + i + 1 for i in range(m))
    absorbed = m * nope * rank + pairs * (rank + rotary) + pairs * rank + m * rank * value
    expanded = n * rank * (nope + value) + pairs * (nope + rotary) + pairs * value
    return absorbed, expanded


@pytest.mark.parametrize("dims", [(512, 128, 64, 128), (16, 16, 8, 16), (32, 16, 8, 16), (24, 12, 8, 20)])
def test_the_cheaper_way_is_taken(dims) -> None:
    rank, nope, rotary, value = dims
    weights = UpProjection(torch.empty(1, nope, rank), torch.empty(1, value, rank))
    for m in (MIN_QUERIES, 100, 170, 171, 172, 340, 2000):
        for n in (m, m + 1, 2 * m, 5 * m, 100_000):
            absorbed, expanded = cost(m, n, *dims)
            assert weights.expands(m, n, rotary) == (expanded < absorbed), (m, n)


def test_where_the_threshold_lies_at_the_shape_of_v3() -> None:
    assert V3.expands(MIN_QUERIES, MIN_QUERIES, 64)
    assert not V3.expands(MIN_QUERIES - 1, MIN_QUERIES - 1, 64)
    assert [V3.expands(m, 100_000, 64) for m in (1, 32, 170, 171, 512)] == [False] * 3 + [True] * 2
