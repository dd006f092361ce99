"""Slot formats of the KV dtypes of vLLM 0.32 that store scales with tokens: a key and a value of one KV head,
each with its own scales. So a slot can be moved alone, and its key be read without another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvreclaim.integrations.vllm.worker.layer_cache import SlotFormat

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
