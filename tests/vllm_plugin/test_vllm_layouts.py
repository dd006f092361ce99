"""Places of keys and values in vLLM's backends: on CPUs written by vLLM's own kernels, for GPUs in every
layout that vLLM allocates. Reads must be in token order, and compaction must move the tokens kept."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.worker.layer_cache import VllmLayerCache
from kvreclaim.integrations.vllm.worker.layouts import CacheViews, PackedLayout

attention = family.module("attention")

L, B, K, D = 3, 8, 2, 64
TOKENS = 75
TABLE = (6, 1, 4, 3, 2)
Exact = Callable[[Tensor, int], Tensor]
"""Near numbers that a cache holds as they are: of keys (0) or values (1). Backends round as they like."""
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def cpu_layer(isa: str, block_size: int, dtype: torch.dtype, cache_dtype: str = "auto") -> Any:
    """An Attention layer as attention.py reads it, around vLLM's own way of storing."""
    stored = dtype if cache_dtype == "auto" else torch.uint8
    impl = SimpleNamespace(attn_type="decoder", kv_cache_dtype=cache_dtype)
    impl.do_kv_cache_update = CPUAttentionBackendImpl.do_kv_cache_update.__get__(impl)
    return SimpleNamespace(
        layer_name="model.layers.0.self_attn.attn",
        attn_backend=CPUAttentionBackend,
        kv_cache=torch.zeros(B, K, block_size, 2 * D, dtype=stored),
        kv_cache_dtype=cache_dtype,
        head_size=D,
        impl=impl,
        isa=isa,
        _k_scale_float=0.5,
        _v_scale_float=2.0,
    )


def fill(
    layer: VllmLayerCache, table: tuple[int, ...], size: int, seed: int, exact: Exact
) -> tuple[Tensor, Tensor]:
    """Random tokens into the table's first slots: keys and values [K, T, D]."""
    noise = torch.Generator().manual_seed(seed)
    keys, values = (
        exact(torch.randn(TOKENS, K, D, generator=noise), part).to(layer.compute) for part in (0, 1)
    )
    slots = torch.tensor([block * size + place for block in table for place in range(size)])[:TOKENS]
    layer.write(keys, values, slots)
    return keys.transpose(0, 1), values.transpose(0, 1)


def check(views: CacheViews, exact: Exact = lambda x, part: x) -> None:
    """Read what was written, then what a compaction kept; one target is a source, one is not."""
    table = TABLE[: -(-TOKENS // views.block_size)]
    written = [fill(layer, table, views.block_size, n, exact) for n, layer in enumerate(views.layers)]
    ids = views.block_ids(table)
    count = views.block_size + 5
    noise = torch.Generator().manual_seed(99)
    rows = [torch.randperm(TOKENS, generator=noise)[:count].sort().values for _ in range(len(written) * K)]
    kept = torch.stack(rows).view(len(written), K, count)
    for n, pair in enumerate(written):
        for part, want in enumerate(pair):
            assert torch.equal(views.read(n, ids, TOKENS, part).float(), want.float())
    target = views.block_ids((table[1], 7))
    views.compact(kept, ids, target)
    for n, pair in enumerate(written):
        for part, want in enumerate(pair):
            stay = want.take_along_dim(kept[n][..., None], 1)
            assert torch.equal(views.read(n, target, count, part).float(), stay.float())


@pytest.mark.parametrize(("isa", "block_size"), [("vec", 32), ("vec", 64), ("vec16", 16), ("vec16", 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_the_cpu_backend_writes(isa: str, block_size: int, dtype: torch.dtype) -> None:
    layer = attention.layer_cache(cpu_layer(isa, block_size, dtype), dtype)
    views = CacheViews([layer], B)
    views.prove()
    assert not layer.cache.any()
    check(views)


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_the_cpu_backend_writes_in_fp8(cache_dtype: str, dtype: torch.dtype) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM stores fp8 on CPUs with AVX-512 only")
    layer = attention.layer_cache(cpu_layer("vec", 32, dtype, cache_dtype), dtype)
    views = CacheViews([layer], B)
    views.prove()

    def exact(x: Tensor, part: int) -> Tensor:
        scale = (0.5, 2.0)[part]
        return (x / scale).to(FP8[cache_dtype]).float() * scale

    check(views, exact)


def test_another_order_on_a_cpu_is_learned_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in pairs of dims, as processors with matrix tiles store them; then one that changes under way."""
    layer = cpu_layer("amx", 32, torch.bfloat16)
    raw = layer.kv_cache.view(B, K, 2 * 32 * D)

    def pairs(_: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            block, place = divmod(slot, 32)
            raw[block, :, : 32 * D].view(K, D // 2, 32, 2)[:, :, place] = key.view(K, D // 2, 2)
            raw[block, :, 32 * D :].view(K, 16, D, 2)[:, place // 2, :, place % 2] = value

    layer.impl.do_kv_cache_update = pairs
    views = CacheViews([attention.layer_cache(layer, torch.bfloat16)], B)
    assert isinstance(views.layouts[0], PackedLayout)
    views.prove()
    check(views)
    real = cpu_layer("vec", 32, torch.bfloat16)
    real.kv_cache = layer.kv_cache
    monkeypatch.setattr(
        layer.impl, "do_kv_cache_update", lambda _, *args: real.impl.do_kv_cache_update(real, *args)
    )
    with pytest.raises(UnsupportedModelError, match="not where kvreclaim reads it"):
        views.prove()


def plain_spec(block_size: int, dtype: torch.dtype) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=K, head_size=D, dtype=dtype)


def gpu_caches(layout: KVCacheLayout, spec: FullAttentionSpec, kernel: int | None = None) -> list[Tensor]:
    """The layers' views [B, K, S, 2D] as vLLM makes them of one buffer."""
    strides = compute_layout_strides(spec, B, L, layout)
    tensor = KVCacheTensor(
        size=L * B * spec.page_size_bytes,
        layers=[f"layer.{n}" for n in range(L)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    return create_kv_cache_views(raw, spec, B, layout, tensor, kernel_block_size=kernel)


def flash_layer(cache: Tensor, dtype: torch.dtype) -> VllmLayerCache:
    """A layer stored as by the GPU backends: the first D of a slot are its key."""
    size = cache.shape[2]

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        parts = cache.transpose(1, 2).split(D, dim=-1)
        for part, rows in zip(parts, (keys, values), strict=True):
            part[slots // size, slots % size] = rows.to(cache.dtype)

    return VllmLayerCache("flash", cache, D, cache.dtype, dtype, 1.0, 1.0, write, packed=False)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_every_layout_of_gpus(layout: KVCacheLayout) -> None:
    caches = gpu_caches(layout, plain_spec(16, torch.bfloat16))
    views = CacheViews([flash_layer(cache, torch.bfloat16) for cache in caches], B)
    views.prove()
    assert not any(cache.any() for cache in caches)
    check(views)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC], ids=lambda layout: layout.name)
def test_kernel_blocks_smaller_than_those_of_the_tables(layout: KVCacheLayout) -> None:
    caches = gpu_caches(layout, plain_spec(32, torch.bfloat16), 16)
    assert caches[0].shape[:3] == (2 * B, K, 16)
    views = CacheViews([flash_layer(cache, torch.bfloat16) for cache in caches], B)
    assert (views.ratio, views.block_size) == (2, 32)
    views.prove()
    check(views)
