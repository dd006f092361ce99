"""Encoding of keys and values into codes and parameters, in PyTorch: the oracle of every kernel.

One token of one head at a time. In all formats the scale is rounded down to a code first and numbers are
divided by the scale of that code.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvreclaim.kv_bytes import VectorBytes
from kvreclaim.ops.formats import scales
from kvreclaim.ops.formats.affine import Groups, bounded
from kvreclaim.ops.formats.format import KVFormat
from kvreclaim.ops.formats.hadamard import rotate, unrotate

FP8_MAX = 448.0
LEVELS = (0.1284, 0.388, 0.6568, 0.9423, 1.2562, 1.618, 2.069, 2.7326)
"""Positive half of Lloyd's and Max's 16 levels for a normal number (arXiv 2504.19874)."""


def encode(fmt: KVFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of the same slots.

    Args:
        fmt:  a format with codes per token
        k, v: [..., D], [..., Dv] any float dtype; NaN is stored as 0, what is too large is cut

    Returns: codes of k [..., D * bits / 8], codes of v [..., Dv * bits / 8], parameters [..., P], all uint8.
    4-bit codes: byte i holds dim 2i in its low half and dim 2i + 1 in its high half.
    Parameters: those of the key, then of the value: (s, z) of each group (int4), or bits 0 ... 7 of the
    scale; then bits 8 ... 11 of the key's scale (low half) and of the value's (high half), unless both have
    groups.
    """
    key, key_params, key_high = _encode_side(fmt.keys, k)
    value, value_params, value_high = _encode_side(fmt.values, v)
    params = [key_params, value_params]
    if not (fmt.keys.has_groups and fmt.values.has_groups):
        params.append((key_high | value_high << 4)[..., None].to(torch.uint8))
    return key, value, torch.cat(params, -1)


def decode_keys(fmt: KVFormat, codes: Tensor, params: Tensor, k_dim: int, v_dim: int) -> Tensor:
    """Decode keys of `encode`: codes [..., D * bits / 8] and parameters [..., P] -> [..., D] fp32."""
    own = params[..., : fmt.keys.param_bytes(k_dim)]
    if fmt.keys.has_groups:
        return _decode_groups(codes, own)
    return _decode_vector(fmt.keys, codes, scale_code(own, params[..., -1] & 15))


def decode_values(fmt: KVFormat, codes: Tensor, params: Tensor, k_dim: int, v_dim: int) -> Tensor:
    """Return the values that `encode` stored: [..., Dv] fp32."""
    first = fmt.keys.param_bytes(k_dim)
    own = params[..., first : first + fmt.values.param_bytes(v_dim)]
    if fmt.values.has_groups:
        return _decode_groups(codes, own)
    return _decode_vector(fmt.values, codes, scale_code(own, params[..., -1] >> 4))


def scale_code(low: Tensor, high: Tensor) -> Tensor:
    """Scale codes of 12 bits [...] int32 of their low bytes [..., 1] and upper bits [...]."""
    return low[..., 0].int() | high.int() << 8


def round_trip(fmt: KVFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as they are read back after a write: [..., D], [..., Dv] in fmt.number."""
    if fmt.dtype is not None:
        return k.to(fmt.dtype), v.to(fmt.dtype)
    keys, values, params = encode(fmt, k, v)
    dims = k.shape[-1], v.shape[-1]
    return decode_keys(fmt, keys, params, *dims), decode_values(fmt, values, params, *dims)


def pack(numbers: Tensor) -> Tensor:
    """[..., D] integers of 0 ... 15 -> [..., D / 2] uint8, the even dim in the low half."""
    pairs = numbers.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(codes: Tensor) -> Tensor:
    """pack undone: [..., D / 2] uint8 -> [..., D] uint8."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


@cache
def level_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 16 levels ascending and the 15 boundaries halfway between them, fp32."""
    half = torch.tensor(LEVELS, device=device)
    levels = torch.cat((-half.flip(0), half))
    return levels, (levels[1:] + levels[:-1]) / 2


def _encode_side(form: VectorBytes, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., D] -> codes, parameters [..., 2 groups(D) or 1] and bits 8 ... 11 of the scale's code [...]."""
    if form.has_groups:
        codes, params = _encode_groups(x)
        return codes, params, torch.zeros_like(params[..., 0])
    codes, scale = _encode_vector(form, x)
    return codes, (scale & 255)[..., None].to(torch.uint8), (scale >> 8).to(torch.uint8)


def _encode_vector(form: VectorBytes, x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> codes and the scale's code [...]."""
    x = bounded(x)
    if form.name == "int8":
        code = scales.INT8.encode(x.abs().amax(-1) / 127)
        steps = torch.round(x / scales.INT8.decode(code)[..., None]).clamp(-127, 127)
        return (steps + 128).to(torch.uint8), code
    if form.name == "fp8_e4m3":
        code = scales.FP8.encode(x.abs().amax(-1) / FP8_MAX)
        numbers = (x / scales.FP8.decode(code)[..., None]).clamp(-FP8_MAX, FP8_MAX)
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8), code
    assert form.name == "turboquant4", form.name
    norm = torch.linalg.vector_norm(x, dim=-1)
    code = scales.TURBO.encode(norm / x.shape[-1] ** 0.5).clamp_min(1).masked_fill(norm == 0, 0)
    numbers = rotate(x) / scales.TURBO.decode(code)[..., None]
    return pack(torch.bucketize(numbers, level_table(x.device)[1])), code


def _decode_vector(form: VectorBytes, codes: Tensor, scale: Tensor) -> Tensor:
    """Invert _encode_vector: [..., D] fp32."""
    if form.name == "int8":
        return (codes.float() - 128) * scales.INT8.decode(scale)[..., None]
    if form.name == "fp8_e4m3":
        return codes.view(torch.float8_e4m3fn).float() * scales.FP8.decode(scale)[..., None]
    assert form.name == "turboquant4", form.name
    return unrotate(decode_rotated(codes, scale))


def decode_rotated(codes: Tensor, scale: Tensor) -> Tensor:
    """turboquant4 with the rotation left in, for attention that turns queries instead: [..., D] fp32."""
    step = scales.TURBO.decode(scale).masked_fill(scale == 0, 0.0)
    return level_table(codes.device)[0][unpack(codes).long()] * step[..., None]


def _encode_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """int4: [..., D] -> codes [..., D / 2] and (s, z) of each group of 32 dims [..., 2 groups(D)], uint8."""
    found = Groups.encode(rotate(bounded(x)))
    return pack(found.n), torch.stack((found.s, found.z), -1).flatten(-2)


def _decode_groups(codes: Tensor, params: Tensor) -> Tensor:
    """Invert _encode_groups: [..., D] fp32."""
    s, z = params.unflatten(-1, (-1, 2)).unbind(-1)
    return unrotate(Groups(unpack(codes), s, z).decode())
