"""Scores straight from the blocks equal ops.scoring in fp64, within fp32 rounding of their terms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_pair import DTYPES, LENGTHS, Dims, Pair, make_pair
from scoring_cases import LAYOUTS, STYLES, check_trig, layout_of, random
from torch import Tensor

from kvreclaim.ops import native, scoring
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.rope import RopeLayout

SUM_ERROR = 6e-7
"""Tolerance of a sum of products, relative to the sum of their magnitudes: a few roundings of fp32."""
SOFTMAX_ERROR = 3e-5
"""Relative, for logits up to about 20."""
MORE = {"odd bands": (64, 5, 0), "late start": (96, 24, 16), "odd start": (64, 8, 7)}
ALL_LAYOUTS = pytest.mark.parametrize("where", [*LAYOUTS.values(), *MORE.values()], ids=[*LAYOUTS, *MORE])


def assert_trig(pair: Pair, queries: Tensor, weights: Tensor | None, layout: RopeLayout) -> None:
    for layer in range(pair.native.num_layers):
        got = native.trig_norm_scores(
            PagedTokens(pair.native.layers[layer], pair.block_ids, pair.num_tokens), queries, weights, layout
        )
        check_trig(got, pair.keys[layer].double(), queries, weights, layout, SUM_ERROR)


@DTYPES
@STYLES
@ALL_LAYOUTS
@pytest.mark.usefixtures("isa")
def test_trig_norm_of_every_layout(where: tuple[int, int, int], style: str, dtype: torch.dtype) -> None:
    dim, bands, start = where
    pair = make_pair(Dims(dim=dim, dtype=dtype), 53)
    queries, weights = random(8, 1, dim), random(8, bands)
    assert_trig(pair, queries, weights, layout_of(bands, start, style))
    assert_trig(pair, queries, None, layout_of(bands, start, style))


@DTYPES
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_trig_norm_of_every_length(num_tokens: int, dtype: torch.dtype) -> None:
    pair = make_pair(Dims(dtype=dtype, layers=1), num_tokens)
    assert_trig(pair, random(8, 1, 64), random(8, 32), layout_of(32, 0, "half"))


@DTYPES
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 17])
def test_trig_norm_of_groups_and_rows(group: int, rows: int, dtype: torch.dtype) -> None:
    pair = make_pair(Dims(dim=32, layers=1, block_size=32, dtype=dtype), 75)
    queries, weights = random(2 * group, rows, 32), random(2 * group, 12)
    assert_trig(pair, queries, weights, layout_of(12, 4, "half"))
    if rows:
        assert_trig(pair, queries, None, layout_of(12, 4, "interleaved"))


@DTYPES
@STYLES
@pytest.mark.usefixtures("isa", "threads")
def test_trig_norm_on_threads(style: str, dtype: torch.dtype) -> None:
    pair = make_pair(Dims(dim=80, layers=1, block_size=48, dtype=dtype), 1000)
    for bands, start in ((40, 0), (9, 5), (0, 0)):
        layout = layout_of(bands, start, style)
        assert_trig(pair, random(6, 1, 80), random(6, bands), layout)
        assert_trig(pair, random(6, 3, 80), random(6, bands), layout)


@pytest.mark.usefixtures("isa")
def test_band_norms_from_nothing_to_huge() -> None:
    pair = make_pair(Dims(kv_heads=1, dim=32, layers=1, dtype=torch.float32), 32)
    scale = torch.logspace(-12, 12, 32)
    pair.native.k.copy_(pair.native.k * 0)
    pair.native.k[0, pair.block_ids] = (random(2, 1, 32, 16) * scale.view(2, 1, 1, 16)).abs()
    pair.native.k[0, pair.block_ids[0], :, :, 3] = 0
    keys = pair.native.k[0, pair.block_ids].transpose(-1, -2).reshape(1, 32, 32)
    nothing, ones, layout = torch.zeros(1, 0, 32), torch.ones(1, 16), layout_of(16, 0, "half")
    got = native.trig_norm_scores(
        PagedTokens(pair.native.layers[0], pair.block_ids, 32), nothing, ones, layout
    )
    want = scoring.band_power(keys.double(), layout).sqrt().sum(-1)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-14)


def mixture(dims: Dims, group: int, count: int, offsets: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    heads = dims.kv_heads * group
    centers = random(heads, count, offsets, dims.dim, seed=seed) * 2
    variances = random(heads, count, dims.dim // 2, seed=seed + 1).abs()
    return centers, torch.cat([variances, variances], dim=-1)


def assert_mixture(pair: Pair, mix: tuple[Tensor, Tensor], over: slice = slice(None)) -> Tensor:
    centers, variances = mix
    scale = centers.shape[-1] ** -0.5
    for layer in range(pair.native.num_layers):
        got = native.mixture_scores(
            PagedTokens(pair.native.layers[layer], pair.block_ids, pair.num_tokens),
            centers,
            variances,
            scale,
            over,
        )
        want = scoring.mixture_attention(
            pair.keys[layer][:, over].double(), centers.double(), variances.double(), scale
        )
        full = torch.zeros(pair.keys.shape[1:3], dtype=torch.float64)
        full[:, over] = want
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), full, rtol=SOFTMAX_ERROR, atol=1e-10)
    return got


@DTYPES
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_mixture_of_every_length(num_tokens: int, dtype: torch.dtype) -> None:
    dims = Dims(dtype=dtype, layers=1)
    assert_mixture(make_pair(dims, num_tokens), mixture(dims, 2, 3, 5))


@DTYPES
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_mixture_of_every_head_dim(dim: int, dtype: torch.dtype) -> None:
    dims = Dims(dim=dim, dtype=dtype, block_size=32)
    assert_mixture(make_pair(dims, 101), mixture(dims, 2, 3, 2))


@DTYPES
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("offsets", range(1, 8))
def test_mixture_of_centres_and_offsets(group: int, offsets: int, dtype: torch.dtype) -> None:
    dims = Dims(dim=32, dtype=dtype, layers=1)
    pair = make_pair(dims, 70)
    for count in (1, 2, 5, 16, 17):
        assert_mixture(pair, mixture(dims, group, count, offsets))


@DTYPES
@pytest.mark.parametrize(
    "over",
    [slice(4, 90), slice(0, 1), slice(99, 100), slice(63, 66), slice(16, 32), slice(50, 50), slice(70, 200)],
)
def test_mixture_over_some_tokens(over: slice, dtype: torch.dtype) -> None:
    dims = Dims(dtype=dtype)
    got = assert_mixture(make_pair(dims, 100), mixture(dims, 2, 3, 5), over)
    assert got[:, : over.start].eq(0).all()
    assert got[:, over.stop :].eq(0).all()


@DTYPES
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_mixture_does_not_depend_on_threads(kv_heads: int, threads: int, dtype: torch.dtype) -> None:
    dims = Dims(kv_heads=kv_heads, dim=80, dtype=dtype, layers=1)
    pair, mix = make_pair(dims, 300), mixture(dims, 2, 7, 5)
    got = assert_mixture(pair, mix, slice(5, 290))
    torch.set_num_threads(3 - threads)
    assert torch.equal(got, assert_mixture(pair, mix, slice(5, 290)))


def test_mixture_in_several_batches() -> None:
    dims = Dims(kv_heads=1, dim=32, layers=1)
    assert_mixture(make_pair(dims, 9000), mixture(dims, 2, 9, 7))


def test_mixture_with_variances_of_their_own_in_every_dim() -> None:
    dims = Dims(dim=64)
    centers, _ = mixture(dims, 2, 3, 5)
    assert_mixture(make_pair(dims, 100), (centers, random(4, 3, 64).abs()))
    assert_mixture(make_pair(dims, 100), (centers, torch.zeros(4, 3, 64)))


def test_mixture_of_logits_that_overflow_an_exponential() -> None:
    dims = Dims(dim=32, dtype=torch.float32, layers=1)
    pair, (centers, variances) = make_pair(dims, 100), mixture(dims, 1, 2, 3)
    got = native.mixture_scores(
        PagedTokens(pair.native.layers[0], pair.block_ids, 100), centers * 1e4, variances, 1.0, slice(None)
    )
    want = scoring.mixture_attention(pair.keys[0].double(), centers.double() * 1e4, variances.double(), 1.0)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)


@DTYPES
@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("num_tokens", [1, 16, 33, 500])
def test_norms(num_tokens: int, dtype: torch.dtype) -> None:
    for dim, v_dim in ((64, 64), (80, 96), (256, 8), (8, 256), (72, 40)):
        pair = make_pair(Dims(dim=dim, v_dim=v_dim, dtype=dtype), num_tokens)
        for layer in range(2):
            where = (pair.native.layers[layer], pair.block_ids, num_tokens)
            keys, values = (native.token_norms(PagedTokens(*where), values=side) for side in (False, True))
            for got, x in ((keys, pair.keys), (values, pair.values)):
                torch.testing.assert_close(got.double(), x[layer].double().norm(dim=-1), rtol=5e-7, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 150),
    block_size=st.sampled_from([16, 32, 48]),
    kv_heads=st.integers(1, 3),
    bf16=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_block_table(num_tokens: int, block_size: int, kv_heads: int, bf16: bool, seed: int) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    dims = Dims(kv_heads=kv_heads, dim=32, layers=1, block_size=block_size, dtype=dtype)
    pair = make_pair(dims, num_tokens, spare=seed % 5, seed=seed)
    queries, weights = random(2 * kv_heads, 1, 32, seed=seed), random(2 * kv_heads, 16, seed=seed)
    assert_trig(pair, queries, weights, layout_of(16, 0, "half"))
    assert_mixture(pair, mixture(dims, 2, 2, 3, seed=seed), slice(seed % 7, num_tokens - seed % 3))


def test_refuses_what_would_leave_the_cache() -> None:
    pair = make_pair(Dims(), 40)
    layout, good = layout_of(32, 0, "half"), (random(4, 1, 64), random(4, 32))
    tokens = PagedTokens(replace(pair.native.layers[0], index=2), pair.block_ids, 40)
    with pytest.raises(IndexError, match="layer"):
        native.trig_norm_scores(tokens, *good, layout)
    with pytest.raises(ValueError, match="too few blocks"):
        native.trig_norm_scores(PagedTokens(pair.native.layers[0], pair.block_ids, 49), *good, layout)
    with pytest.raises(ValueError, match="names a block outside"):
        native.token_norms(PagedTokens(pair.native.layers[0], pair.block_ids + 100, 40), values=False)
    with pytest.raises(ValueError, match="KV heads"):
        native.trig_norm_scores(
            PagedTokens(pair.native.layers[0], pair.block_ids, 40), random(3, 1, 64), None, layout
        )
    with pytest.raises(ValueError, match="shape"):
        native.mixture_scores(
            PagedTokens(pair.native.layers[0], pair.block_ids, 40),
            random(4, 2, 3, 32),
            random(4, 2, 32),
            1.0,
            slice(None),
        )
