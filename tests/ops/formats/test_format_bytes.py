"""Bytes of a block are what is allocated, parameters included, and as many as the documentation says."""

from __future__ import annotations

import pytest
import torch

from kvreclaim.config import KV_CACHE_DTYPE_ALIASES, KV_CACHE_DTYPES
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import reference
from kvreclaim.ops.cells import cell_view
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import FORMATS, KVFormat, kv_format, plain_format

EACH = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
DIMS = [
    (8, 8, 4),
    (16, 16, 16),
    (32, 32, 16),
    (64, 64, 16),
    (80, 40, 16),
    (128, 128, 32),
    (96, 96, 5),
]


def facts(k_dim: int, v_dim: int, *, kv_heads: int = 2, latent: bool = False) -> LayerFacts:
    return LayerFacts(4, kv_heads, k_dim + v_dim if latent else k_dim, v_dim, Softmax(1.0), latent=latent)


@EACH
@pytest.mark.parametrize(("k_dim", "v_dim", "block_size"), DIMS)
def test_the_formula_is_what_the_pool_takes(fmt: KVFormat, k_dim: int, v_dim: int, block_size: int) -> None:
    layers = (facts(k_dim, v_dim),) * 3
    cache = reference.allocate(layers, 5, block_size, like=torch.empty(0), kv_format=fmt)
    allocated = sum(plane.untyped_storage().nbytes() for plane in cache.planes)
    assert allocated == 5 * cache.bytes_per_block == 5 * fmt.bytes_per_block(layers, block_size)
    assert sum(plane.nbytes for plane in cell_view(cache).planes) == allocated


@EACH
@pytest.mark.parametrize(
    ("dim", "units"),
    [
        (32, (2048, 1072, 576, 560, 832)),
        (64, (4096, 2096, 1152, 1072, 1632)),
        (128, (8192, 4144, 2304, 2096, 3232)),
    ],
)
def test_bytes_of_a_unit_of_16_slots(fmt: KVFormat, dim: int, units: tuple[int, ...]) -> None:
    bf16, int8, int4, turbo, mixed = units
    want = {"fp32": 2 * bf16, "bf16": bf16, "fp16": bf16, "fp8_e4m3": int8, "int8": int8}
    want |= {"int4": int4, "turboquant4": turbo, "int8+int4": mixed}
    assert fmt.unit_bytes(dim, dim, 16) == want[fmt.name]


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_how_many_times_more_tokens_fit_than_in_bf16(dim: int, block_size: int) -> None:
    ratio = {
        name: FORMATS["bf16"].unit_bytes(dim, dim, block_size) / fmt.unit_bytes(dim, dim, block_size)
        for name, fmt in FORMATS.items()
    }
    assert min(ratio["int8"], ratio["fp8_e4m3"]) >= 1.9
    assert min(ratio["int4"], ratio["turboquant4"]) >= 3.4
    assert ratio["int8+int4"] >= 2.4


def test_bytes_of_a_token_of_deepseek_v3() -> None:
    """61 layers of a latent of 512 and a rotary key of 64 dims."""
    layers = (facts(64, 512, kv_heads=1, latent=True),) * 61
    assert layers[0].head_dim == 576
    per_token = {name: fmt.bytes_per_block(layers, 16) / 16 for name, fmt in FORMATS.items()}
    assert per_token["bf16"] == 61 * 576 * 2 == 70_272
    assert per_token["int8"] == per_token["fp8_e4m3"] == 35_319
    assert per_token["int4"] == 19_764
    assert per_token["turboquant4"] == 17_751
    assert per_token["int8+int4"] == 61 * (64 + 512 // 2 + 2 + 2 * 16)


def test_the_formats_are_the_ones_of_the_configuration() -> None:
    assert ("auto", *FORMATS) == KV_CACHE_DTYPES
    assert set(KV_CACHE_DTYPE_ALIASES.values()) <= set(FORMATS)
    assert kv_format("auto", torch.bfloat16) is FORMATS["bf16"]
    assert kv_format("fp8", torch.float32) is FORMATS["fp8_e4m3"]
    with pytest.raises(InvalidArgumentError, match="int3"):
        kv_format("int3", torch.float32)
    with pytest.raises(InvalidArgumentError, match=r"int4\+int8.*one of.*int8\+int4"):
        kv_format("int4+int8", torch.float32)
    with pytest.raises(InvalidArgumentError, match="float64"):
        plain_format(torch.float64)


def test_layouts_have_fingerprints_of_their_own() -> None:
    assert len({fmt.fingerprint for fmt in FORMATS.values()}) == len(FORMATS)


@pytest.mark.parametrize("name", ["int4", "turboquant4"])
def test_two_numbers_of_a_byte_need_an_even_dim(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{name}.*odd"):
        reference.allocate((facts(7, 8),), 2, 16, like=torch.empty(0), kv_format=FORMATS[name])
