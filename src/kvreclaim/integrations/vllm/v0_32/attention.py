"""The KV caches of vLLM 0.32's attention layers, as worker/layouts.py describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvreclaim.integrations.vllm.v0_32 import probing
from kvreclaim.integrations.vllm.worker.layer_cache import SlotFormat, VllmLayerCache, Write

Numbers = Callable[[Tensor, Tensor], Tensor]
"""(stored bytes, scale [..., 1]) -> numbers in fp32."""


@dataclass(frozen=True, slots=True)
class PerTokenHead:
    """Numbers of the key, their scale in fp32, numbers of the value, their scale. half: bytes of either."""

    half: int
    numbers: Numbers

    @property
    def parts(self) -> tuple[slice, slice]:
        return slice(0, self.half), slice(self.half, 2 * self.half)

    def decode(self, stored: Tensor, part: int) -> Tensor:
        return self.numbers(stored[..., :-4], _floats(stored[..., -4:], torch.float32))


@dataclass(frozen=True, slots=True, eq=False)
class TurboQuant:
    """Keys in fp8, or turned by a Hadamard matrix, as indices of centroids, with their norm in fp16; values
    in 3 or 4 bits with scale and zero point in fp16. layer: has matrix and centroids once it has stored."""

    layer: Any

    @property
    def parts(self) -> tuple[slice, slice]:
        config = self.layer.impl.tq_config
        end = config.key_packed_size
        return slice(0, end), slice(end, end + config.value_packed_size)

    def decode(self, stored: Tensor, part: int) -> Tensor:
        config = self.layer.impl.tq_config
        dim = config.head_dim
        if part:
            scale, zero = _floats(stored[..., -4:], torch.float16).split(1, dim=-1)
            return _unpacked(stored[..., :-4], config.effective_value_quant_bits, dim) * scale + zero
        if config.key_fp8:
            return stored.view(torch.float8_e4m3fn).float()
        found = self.layer._tq_centroids[_unpacked(stored[..., :-2], config.key_mse_bits, dim)]
        if config.norm_correction:
            found = found / torch.linalg.vector_norm(found, dim=-1, keepdim=True)
        return _floats(stored[..., -2:], torch.float16) * found @ self.layer._tq_Pi


def slot_format(layer: Any) -> SlotFormat | None:
    """Find the format of an attention layer; None where its cache holds plain numbers."""
    if layer.kv_cache_dtype.startswith("turboquant_"):
        return TurboQuant(layer)
    numbers: Numbers | None = {
        "int8_per_token_head": lambda stored, scale: stored.view(torch.int8).float() * scale,
        "fp8_per_token_head": lambda stored, scale: stored.view(layer.impl.fp8_dtype).float() * scale,
        "int4_per_token_head": _turned_int4,
    }.get(layer.kv_cache_dtype)
    return None if numbers is None else PerTokenHead(layer.kv_cache.shape[-1] // 2, numbers)


def _turned_int4(stored: Tensor, scale: Tensor) -> Tensor:
    """Turned by a Hadamard matrix with signs; the zero point is in the scale's last four bits."""
    from vllm.v1.attention.ops.int4_per_token_head import largest_power_of_2_divisor, single_rht

    bits = scale.view(torch.int32)
    dim = 2 * stored.shape[-1]
    turned = (_unpacked(stored, 4, dim) - (bits & 15)) * (bits & ~15).view(torch.float32)
    return single_rht(turned, inverse=True) / largest_power_of_2_divisor(dim)


def _floats(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., n] as numbers of the dtype, fp32."""
    return stored.contiguous().view(dtype).float()


def _unpacked(stored: Tensor, bits: int, dim: int) -> Tensor:
    """dim numbers of 3 or 4 bits, the first in the lowest: [..., dim] int32."""
    at = torch.arange(dim, device=stored.device) * bits
    first = at // 8
    second = (first + 1).clamp(max=stored.shape[-1] - 1)
    both = stored[..., first].int() | stored[..., second].int() << 8
    return both >> at % 8 & (1 << bits) - 1


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
