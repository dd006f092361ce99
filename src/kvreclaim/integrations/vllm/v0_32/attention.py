"""The KV caches of vLLM 0.32's attention layers, as worker/layouts.py describes them."""

from __future__ import annotations

from typing import Any

import torch

from kvreclaim.integrations.vllm.v0_32 import probing
from kvreclaim.integrations.vllm.v0_32.slot_formats import slot_format
from kvreclaim.integrations.vllm.worker.layer_cache import VllmLayerCache, Write

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The dtype of a uint8 cache's bytes, by vLLM's name of the cache dtype."""
PACKED_BACKENDS = frozenset({"CPU_ATTN"})
"""Backends with an order of their own inside a block; all others keep a token's key and value in its slot."""


def layer_caches(runner: Any) -> tuple[VllmLayerCache, ...]:
    """The caches of all attention layers, in the order of the layers."""
    return tuple(layer_cache(layer, runner.model_config.dtype) for layer in probing.attention_layers(runner))


def num_blocks(runner: Any) -> int:
    """Blocks of the pool, the null block included."""
    return int(runner.kv_cache_config.num_blocks)


def layer_cache(layer: Any, dtype: torch.dtype) -> VllmLayerCache:
    """The cache of one. dtype: that the model computes in."""
    backend, cache = layer.attn_backend.get_name(), layer.kv_cache
    stored, slots = FP8.get(layer.kv_cache_dtype), slot_format(layer)
    on_host = cache.device.type == "cpu"
    k_scale, v_scale = 1.0, 1.0
    if stored is not None:  # the CPU backend takes its scales from the host's copies
        k_scale = layer._k_scale_float if on_host else layer._k_scale
        v_scale = layer._v_scale_float if on_host else layer._v_scale
    return VllmLayerCache(
        name=f"{layer.layer_name} ({backend}{f', isa {layer.isa}' if hasattr(layer, 'isa') else ''})",
        cache=cache if slots is None else cache.view(torch.uint8),
        head_dim=layer.head_size,
        stored=cache.dtype if stored is None else stored,
        compute=dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        write=_writer(layer),
        packed=backend in PACKED_BACKENDS,
        slots=slots,
    )


def _writer(layer: Any) -> Write:
    """The backend's own way of storing keys and values."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    return write
