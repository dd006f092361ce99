"""Scores straight from the blocks equal ops.scoring in fp64, within fp32 rounding of their terms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import Shape
from scoring_cases import LAYOUTS, STYLES, check_trig, layout_of, random
from torch import Tensor
from triton_pair import DEVICE, DTYPES, Pair, make_pair

from kvreclaim.ops import reference, scoring
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.rope import RopeLayout

SUM_ERROR = 1e-6
"""Tolerance of a sum of products, relative to the sum of their magnitudes."""
SOFTMAX_ERROR = 1e-4
LENGTHS = (1, 16, 17, 64, 65, 130)
ALL_LAYOUTS = pytest.mark.parametrize("where", [*LAYOUTS.values(), (192, 96, 0)], ids=[*LAYOUTS, "whole192"])
GROUPS = pytest.mark.parametrize("group", [1, 4, 8, 3, 20])


def keys_of(pair: Pair, layer: int) -> Tensor:
    return reference.gather_tokens(
        PagedTokens(pair.reference.layers[layer], pair.block_ids, pair.num_tokens)
    )[0].double()


def assert_trig(pair: Pair, queries: Tensor, weights: Tensor | None, layout: RopeLayout) -> None:
    for layer in range(pair.reference.num_layers):
        there = queries.to(DEVICE), None if weights is None else weights.to(DEVICE)
        got = kernels.trig_norm_scores(
            PagedTokens(pair.kernel.layers[layer], pair.device_ids, pair.num_tokens), *there, layout
        )
        check_trig(got, keys_of(pair, layer), queries, weights, layout, SUM_ERROR)


@STYLES
@ALL_LAYOUTS
def test_trig_norm_of_every_layout(where: tuple[int, int, int], style: str) -> None:
    dim, bands, start = where
    layout = layout_of(bands, start, style)
    pair = make_pair(Shape(kv_heads=1, group=2, dim=dim, dtype=torch.bfloat16), 70)
    assert_trig(pair, random(2, 1, dim), random(2, bands, seed=2), layout)


@DTYPES
@GROUPS
@pytest.mark.parametrize("num_queries", [0, 1, 2, 17])
def test_trig_norm_of_every_group(group: int, num_queries: int, dtype: torch.dtype) -> None:
    """Queries and weights together, and each alone."""
    pair = make_pair(Shape(kv_heads=2, dim=32, block_size=4, dtype=dtype), 21)
    layout = layout_of(16)
    queries = random(2 * group, num_queries, 32)
    assert_trig(pair, queries, random(2 * group, 16, seed=2), layout)
    assert_trig(pair, queries, None, layout)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_trig_norm_of_every_length(num_tokens: int) -> None:
    pair = make_pair(Shape(kv_heads=2, dim=64, layers=2), num_tokens)
    layout = layout_of(32)
    assert_trig(pair, random(8, 3, 64), random(8, 32, seed=2), layout)


def assert_mixture(pair: Pair, centers: Tensor, variances: Tensor, scale: float, over: slice) -> None:
    for layer in range(pair.reference.num_layers):
        there = centers.to(DEVICE), variances.to(DEVICE), scale, over
        got = kernels.mixture_scores(
            PagedTokens(pair.kernel.layers[layer], pair.device_ids, pair.num_tokens), *there
        )
        wide = centers.double(), variances.double(), scale, over
        want = scoring.mixture_scores(keys_of(pair, layer), *wide)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.cpu(), want, rtol=SOFTMAX_ERROR, atol=1e-30)


def mixture(heads: int, count: int, offsets: int, dim: int) -> tuple[Tensor, Tensor]:
    variances = random(heads, count, dim // 2, seed=4).square()
    return random(heads, count, offsets, dim, seed=3), torch.cat([variances, variances], -1)


@DTYPES
@pytest.mark.parametrize("dim", [32, 80, 128, 192, 256])
def test_mixture_of_every_dim(dim: int, dtype: torch.dtype) -> None:
    pair = make_pair(Shape(kv_heads=2, dim=dim, dtype=dtype), 70)
    assert_mixture(pair, *mixture(4, 3, 2, dim), dim**-0.5, slice(4, 69))


@pytest.mark.parametrize(("group", "count", "offsets"), [(1, 1, 1), (4, 16, 2), (8, 3, 1), (3, 7, 5)])
def test_mixture_of_every_group(group: int, count: int, offsets: int) -> None:
    pair = make_pair(Shape(kv_heads=2, dim=32), 40)
    assert_mixture(pair, *mixture(2 * group, count, offsets, 32), 0.3, slice(0, None))


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("over", [slice(None), slice(3, -2), slice(0, 1), slice(5, 5)], ids=str)
def test_mixture_among_some_tokens(num_tokens: int, over: slice) -> None:
    """What lies outside scores 0 and takes no share."""
    pair = make_pair(Shape(kv_heads=1, dim=32, layers=2, block_size=8), num_tokens)
    assert_mixture(pair, *mixture(2, 2, 2, 32), 0.5, over)


def test_mixture_of_one_key_far_ahead() -> None:
    """Logits of thousands neither overflow nor leave anything for the others."""
    pair = make_pair(Shape(kv_heads=1, dim=32), 70)
    centers, variances = mixture(2, 2, 2, 32)
    got = kernels.mixture_scores(
        PagedTokens(pair.kernel.layers[0], pair.device_ids, 70),
        centers.to(DEVICE),
        0 * variances.to(DEVICE),
        1e3,
        slice(None),
    )
    assert torch.isfinite(got).all()
    assert got.max() <= 1.0
    want = scoring.mixture_scores(keys_of(pair, 0), centers.double(), 0 * variances, 1e3, slice(None))
    torch.testing.assert_close(got.cpu(), want, rtol=0.02, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("dims", [(32, 64), (80, 24), (256, 96)])
@pytest.mark.parametrize("num_tokens", [1, 17, 70])
def test_norms(dims: tuple[int, int], num_tokens: int, dtype: torch.dtype) -> None:
    pair = make_pair(Shape(kv_heads=2, dim=dims[0], v_dim=dims[1], layers=2, dtype=dtype), num_tokens)
    for layer in range(2):
        for values in (False, True):
            device = PagedTokens(pair.kernel.layers[layer], pair.device_ids, num_tokens)
            host = PagedTokens(pair.reference.layers[layer], pair.block_ids, num_tokens)
            got = kernels.token_norms(device, values=values)
            want = reference.token_norms(host, values=values)
            torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=0)


def test_no_tokens_at_all() -> None:
    pair = make_pair(Shape(kv_heads=2, dim=32), 5)
    layout = RopeLayout(torch.ones(16, dtype=torch.float64))
    args = (pair.kernel.layers[0], pair.device_ids[:0], 0)
    queries, weights = random(4, 1, 32).to(DEVICE), random(4, 16).to(DEVICE)
    assert kernels.trig_norm_scores(PagedTokens(*args), queries, weights, layout).shape == (4, 0)
    assert kernels.token_norms(PagedTokens(*args), values=False).shape == (2, 0)
    centers, variances = (x.to(DEVICE) for x in mixture(4, 2, 2, 32))
    assert kernels.mixture_scores(PagedTokens(*args), centers, variances, 0.5, slice(None)).shape == (2, 0)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 99), st.data())
def test_any_block_tables(num_tokens: int, block_size: int, seed: int, data) -> None:
    pair = make_pair(Shape(kv_heads=2, dim=8, block_size=block_size), num_tokens, seed)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, num_tokens), st.integers(0, num_tokens))))
    assert_mixture(pair, *mixture(4, 2, 1, 8), 0.5, slice(start, stop))
    layout = RopeLayout(torch.ones(4, dtype=torch.float64))
    assert_trig(pair, random(4, 2, 8), random(4, 4, seed=2), layout)
