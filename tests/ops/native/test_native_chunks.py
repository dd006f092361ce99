"""Writes that fill sixteen slots hold the reference's bytes, and those of single writes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_native_storage import CODED, SHAPES, Dims
from torch import Tensor
from unit_rows import unit_rows

from kvreclaim.ops import native, reference
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.formats.scales import FP8, INT8, TURBO, ScaleCode
from kvreclaim.ops.kv_cache import KVCache

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDE = [*SHAPES, Dims(128, 128), Dims(64, 64)]
BLOCKS = 5


@pytest.fixture(autouse=True)
def _best_isa_after() -> Iterator[None]:
    yield
    native.force_isa(native.supported_isas()[0])


isas = pytest.mark.parametrize("isa", native.supported_isas())
shapes = pytest.mark.parametrize("dims", WIDE, ids=lambda d: f"d{d.k_dim} v{d.v_dim} s{d.block_size}")


def odd_tokens(dims: Dims, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens with NaN, numbers that are too large, equal ones and zeros of both signs among them."""
    k, v = dims.tokens(torch.Generator().manual_seed(dims.k_dim), count)
    k[3, 0, 1], v[5, 0, 2], k[7, 0, 3] = torch.nan, torch.inf, -3e38
    k[9], v[9], k[10], v[11] = 0.0, 0.0, -0.0, 2.5
    return k.to(dtype), v.to(dtype)


def allocate(dims: Dims, backend, name: str, blocks: int = BLOCKS) -> KVCache:
    dim = dims.k_dim + dims.v_dim * dims.latent
    layer = LayerFacts(dims.heads, dims.heads, dim, dims.v_dim, Softmax(1.0), latent=dims.latent)
    return backend.allocate((layer,), blocks, dims.block_size, like=torch.empty(0), kv_format=FORMATS[name])


@isas
@shapes
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_sixteen_at_a_time_as_one_by_one(isa: str, dims: Dims, name: str, dtype: torch.dtype) -> None:
    native.force_isa(isa)
    ours, single = (allocate(dims, native, name) for _ in range(2))
    plain = allocate(dims, reference, name)
    size = dims.block_size
    slots = torch.cat([torch.arange(size) + block * size for block in (3, 1, 4)])[5:-3]
    k, v = odd_tokens(dims, len(slots), dtype)
    native.write_kv(ours.layers[0], k, v, slots)
    reference.write_kv(plain.layers[0], k, v, slots)
    for t in range(len(slots)):
        native.write_kv(single.layers[0], k[t : t + 1], v[t : t + 1], slots[t : t + 1])
    assert torch.equal(ours.planes[0], single.planes[0])
    where = (0, slots // size, slice(None), slots % size)
    for got, want in zip(unit_rows(ours), plain.planes, strict=True):
        off = got[where] != want[where]
        assert off.float().mean() <= (1e-3 if FORMATS[name].is_rotated else 0)


def edges(code: ScaleCode, factor: float) -> Tensor:
    """factor times the scales where each code begins, and the four numbers before and after each."""
    first = 2.0 ** ((np.arange(1, code.last + 1) - 2.0**-10) / code.steps - code.bias)
    bits = (first * factor).astype(np.float32).view(np.int32)
    return torch.from_numpy((bits[:, None] + np.arange(-4, 5, dtype=np.int32)).view(np.float32).reshape(-1))


def with_edges(code: ScaleCode, factor: float) -> tuple[Dims, Tensor]:
    """[T, 1, 8] vectors with one of the edges each."""
    x = edges(code, factor)
    return Dims(8, 8, heads=1, layers=1), torch.nn.functional.pad(x[:, None, None], (0, 7))


def vectors_at_edges() -> list:
    return [
        pytest.param("int8", INT8, 127.0, id="int8"),
        pytest.param("fp8_e4m3", FP8, 448.0, id="fp8_e4m3"),
        pytest.param("turboquant4", TURBO, 8**0.5, id="turboquant4"),
    ]


@isas
@pytest.mark.parametrize(("name", "code", "factor"), vectors_at_edges())
@pytest.mark.parametrize("shift", [0, 1], ids=["chunks", "tokens"])
def test_scale_codes_at_their_edges(isa: str, name: str, code: ScaleCode, factor: float, shift: int) -> None:
    native.force_isa(isa)
    dims, x = with_edges(code, factor)
    blocks = len(x) // 16 + 2
    ours, plain = (allocate(dims, backend, name, blocks) for backend in (native, reference))
    slots = torch.arange(len(x)) + shift
    for backend, cache in ((native, ours), (reference, plain)):
        backend.write_kv(cache.layers[0], x, x, slots)
    off = unit_rows(ours)[2] != plain.planes[2]
    assert off.float().mean() <= (1e-3 if FORMATS[name].is_rotated else 0)
