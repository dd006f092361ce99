"""Surrogate scores straight from the blocks equal the features in fp64 times the weights."""

from __future__ import annotations

import pytest
import torch
from paged_oracle import Shape
from scoring_cases import STYLES, layout_of, random
from test_triton_scoring import ALL_LAYOUTS, LENGTHS
from torch import Tensor
from triton_pair import DEVICE, DTYPES, Pair, make_pair

from kvreclaim.ops import reference, scoring
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.rope import RopeLayout

ERROR = 2e-6
"""Relative to the sum of the terms' magnitudes."""


def assert_surrogate(pair: Pair, layout: RopeLayout | None, owners: Tensor | None = None) -> None:
    """owners: one row of weights per block, instead of one per head."""
    for layer in range(pair.reference.num_layers):
        host = PagedTokens(pair.reference.layers[layer], pair.block_ids, pair.num_tokens)
        rows = scoring.surrogate_features(*(x.double() for x in reference.gather_tokens(host)), layout)
        weights = random(rows.shape[0] if owners is None else 3, rows.shape[-1], seed=layer)
        device = PagedTokens(pair.kernel.layers[layer], pair.device_ids, pair.num_tokens)
        there = None if owners is None else owners.to(DEVICE)
        got = kernels.surrogate_scores(device, weights.to(DEVICE), layout, there).cpu()
        own = weights[:, None]
        if owners is not None:
            own = weights[owners.repeat_interleave(pair.reference.block_size)][None, : pair.num_tokens]
        terms = rows * own.double()
        assert got.dtype == torch.float32
        assert ((got - terms.sum(-1)).abs() <= ERROR * terms.abs().sum(-1)).all()
        plain = reference.surrogate_scores(host, weights, layout, owners)
        assert ((plain - terms.sum(-1)).abs() <= ERROR * terms.abs().sum(-1)).all()


@STYLES
@ALL_LAYOUTS
def test_every_layout(where: tuple[int, int, int], style: str) -> None:
    dim, bands, start = where
    pair = make_pair(Shape(kv_heads=2, dim=dim, dtype=torch.bfloat16), 70)
    assert_surrogate(pair, layout_of(bands, start, style))
    assert_surrogate(pair, None)


@DTYPES
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_length(num_tokens: int, dtype: torch.dtype) -> None:
    pair = make_pair(Shape(kv_heads=2, dim=32, v_dim=24, layers=2, dtype=dtype), num_tokens)
    assert_surrogate(pair, layout_of(12, 4))


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_weights_of_each_block(block_size: int) -> None:
    pair = make_pair(Shape(kv_heads=1, dim=32, block_size=block_size), 70)
    owners = torch.randint(3, pair.block_ids.shape, generator=torch.Generator().manual_seed(1))
    assert_surrogate(pair, layout_of(16), owners)


def test_the_reference_takes_long_sequences_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreclaim.ops.reference.scores.PIECE", 20)
    pair = make_pair(Shape(kv_heads=1, dim=32, block_size=7), 70)
    assert_surrogate(pair, layout_of(16))
    assert_surrogate(pair, layout_of(16), torch.arange(10) % 3)


def test_no_tokens_at_all() -> None:
    pair = make_pair(Shape(kv_heads=2, dim=32), 5)
    tokens = PagedTokens(pair.kernel.layers[0], pair.device_ids[:0], 0)
    assert kernels.surrogate_scores(tokens, random(2, 16 + 32 + 3).to(DEVICE), layout_of(16)).shape == (2, 0)
