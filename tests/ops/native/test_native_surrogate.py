"""Surrogate scores straight from the blocks equal the features in fp64 times the weights."""

from __future__ import annotations

import pytest
import torch
from native_pair import DTYPES, LENGTHS, Dims, Pair, make_pair
from scoring_cases import STYLES, layout_of, random
from test_native_scoring import ALL_LAYOUTS
from torch import Tensor

from kvreclaim.ops import key_source, native, scoring
from kvreclaim.ops.cells import cell_layers, natural_cells
from kvreclaim.ops.key_source import PagedSource
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.rope import RopeLayout

ERROR = 1e-6
"""Relative to the sum of the terms' magnitudes: roundings of fp32 sums and of the logarithm."""


def features(pair: Pair, layer: int, layout: RopeLayout | None) -> Tensor:
    return scoring.surrogate_features(pair.keys[layer].double(), pair.values[layer].double(), layout)


def assert_surrogate(pair: Pair, layout: RopeLayout | None) -> Tensor:
    for layer in range(pair.native.num_layers):
        rows = features(pair, layer, layout)
        weights = random(rows.shape[0], rows.shape[-1], seed=layer)
        tokens = PagedTokens(pair.native.layers[layer], pair.block_ids, pair.num_tokens)
        got = native.surrogate_scores(tokens, weights, layout)
        terms = rows * weights.double()[:, None]
        assert got.dtype == torch.float32
        assert ((got - terms.sum(-1)).abs() <= ERROR * terms.abs().sum(-1)).all()
    return got


@DTYPES
@STYLES
@ALL_LAYOUTS
@pytest.mark.usefixtures("isa")
def test_every_layout(where: tuple[int, int, int], style: str, dtype: torch.dtype) -> None:
    dim, bands, start = where
    pair = make_pair(Dims(dim=dim, v_dim=40, dtype=dtype), 53)
    assert_surrogate(pair, layout_of(bands, start, style))
    assert_surrogate(pair, None)


@DTYPES
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_length(num_tokens: int, dtype: torch.dtype) -> None:
    assert_surrogate(make_pair(Dims(dtype=dtype, block_size=48), num_tokens), layout_of(32, 0, "half"))


@pytest.mark.usefixtures("isa")
def test_does_not_depend_on_threads(threads: int) -> None:
    pair = make_pair(Dims(kv_heads=3), 700)
    got = assert_surrogate(pair, layout_of(32, 0, "half"))
    torch.set_num_threads(3 - threads)
    assert torch.equal(got, assert_surrogate(pair, layout_of(32, 0, "half")))


@pytest.mark.usefixtures("isa")
def test_logarithms_from_nothing_to_huge() -> None:
    dims = Dims(kv_heads=1, dim=32, v_dim=8, layers=1, dtype=torch.float32)
    pair, layout = make_pair(dims, 48), layout_of(16, 0, "half")
    scale = torch.logspace(-12, 12, 48).view(3, 1, 16)
    pair.native.k[0, pair.block_ids] *= scale[..., None, :]
    pair.native.v[0, pair.block_ids] *= scale[..., None]
    tokens = PagedTokens(pair.native.layers[0], pair.block_ids, 48)
    weights = torch.zeros(1, 16 + 8 + 3)
    weights[:, :16] = weights[:, -2] = 1
    found = scoring.surrogate_features(*(x.double() for x in native.gather_tokens(tokens)), layout)
    got = native.surrogate_scores(tokens, weights, layout)
    torch.testing.assert_close(got.double(), (found * weights.double()).sum(-1), rtol=1e-6, atol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("what", ["k", "v"])
def test_what_is_no_number_scores_none(what: str) -> None:
    pair = make_pair(Dims(layers=1), 40)
    getattr(pair.native, what).view(torch.int16)[0, pair.block_ids[1], 1].fill_(0x7FC0)
    tokens = PagedTokens(pair.native.layers[0], pair.block_ids, 40)
    got = native.surrogate_scores(tokens, random(2, 32 + 64 + 3), layout_of(32, 0, "half"))
    assert got[1, 16:32].isnan().all()
    assert not got[0].isnan().any()
    assert not got[1, :16].isnan().any()


@pytest.mark.usefixtures("isa", "threads")
def test_heads_of_all_layers_at_once_are_each_as_alone() -> None:
    pair, layout = make_pair(Dims(kv_heads=3, block_size=32), 150), layout_of(32, 0, "half")
    cells = natural_cells(pair.native, pair.block_ids.numpy())
    weights = [random(1, 99, seed=seed) for seed in range(6)]
    lengths = [150, 1, 33, 64, 149, 90]
    sources = [
        PagedSource(native, PagedTokens(layer, torch.from_numpy(row).long(), length))
        for layer, row, length in zip(
            [layer for layer in cell_layers(pair.native) for _ in range(3)],
            cells.reshape(6, -1),
            lengths,
            strict=True,
        )
    ]
    together = key_source.surrogate_scores(sources, weights, layout)
    for i, (source, rows, got) in enumerate(zip(sources, weights, together, strict=True)):
        assert torch.equal(got, source.surrogate_scores(rows, layout))
        wanted = (features(pair, i // 3, layout)[i % 3] @ rows[0].double())[: lengths[i]]
        torch.testing.assert_close(got[0].double(), wanted, rtol=1e-5, atol=1e-4)


def test_refuses_what_would_leave_the_tensors() -> None:
    pair, layout = make_pair(Dims(), 40), layout_of(32, 0, "half")
    tokens = PagedTokens(pair.native.layers[0], pair.block_ids, 40)
    with pytest.raises(ValueError, match="shape"):
        native.surrogate_scores(tokens, random(2, 98), layout)
    with pytest.raises(ValueError, match="row for each KV head"):
        native.surrogate_scores(tokens, random(1, 99), layout)
    for owners, message in (([0, 1, 2], "outside the weights"), ([0, 1], "shape")):
        with pytest.raises(ValueError, match=message):
            native.surrogate_scores(tokens, random(2, 99), layout, torch.tensor(owners))
    with pytest.raises(ValueError, match="fit the head dim"):
        native.surrogate_scores(tokens, random(2, 99), layout_of(33, 0, "half"))
