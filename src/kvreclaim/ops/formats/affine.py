"""int4's groups of codes around a centre: x = s (n + (z / STEPS - 7.5)), n = 0 ... 15.

The scale s is a code (scales.py); the centre z is a whole number of s / STEPS, so each takes a byte. The
error is at most s/2 with s = (max - min) / 15, as long as the centre is within 2.7 times the range of zero;
beyond, s grows with the centre, and the error is half of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.kv_bytes import GROUP
from kvreclaim.ops.formats.scales import INT4

LIMIT = 1e30
"""Numbers are bounded before anything is computed of them; every format clips far below."""
STEPS = 3
"""Steps of the centre within s."""
REACH = 40.5
"""The scale s is at least abs(centre) / REACH, such that z still fits after s has been rounded down:
3 * 40.5 * 2^(1/16) = 126.9."""
LOW, HIGH = -128, 127
"""Bounds of z, whose code is z - LOW. Code 0 stands for a group of zeros, so that cleared memory is zeros."""


def bounded(x: Tensor) -> Tensor:
    """fp32; NaN becomes 0 and anything beyond LIMIT is cut: what all codecs start with."""
    return x.float().nan_to_num(0.0, LIMIT, -LIMIT).clamp(-LIMIT, LIMIT)


def encode_group(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups along the last dim.

    x: [..., g] any float dtype. Returns: n [..., g], code of s [...], code of z [...], all int32.
    """
    x = bounded(x)
    least, most = x.aminmax(dim=-1, keepdim=True)
    centre = (least + most) / 2
    code = INT4.encode(torch.maximum((most - least) / 15, centre.abs() / REACH))
    scale = INT4.decode(code)
    z = torch.round(STEPS * (centre / scale - _half(least, most))).clamp(LOW + 1, HIGH)
    n = torch.round(x / scale - (z / STEPS - 7.5)).clamp(0, 15)
    nothing = (least == 0) & (most == 0)
    n, code, z = n.masked_fill(nothing, 0), code.masked_fill(nothing, 0), z.masked_fill(nothing, LOW)
    return n.to(torch.int32), code[..., 0], (z[..., 0] - LOW).to(torch.int32)


def decode_group(n: Tensor, scale: Tensor, centre: Tensor) -> Tensor:
    """Invert encode_group: [..., g], [...], [...] integers. Returns: [..., g] fp32."""
    step = INT4.decode(scale).masked_fill(centre == 0, 0.0)
    first = (centre.float() + LOW) / STEPS - 7.5
    return step[..., None] * (n.float() + first[..., None])


def _half(least: Tensor, most: Tensor) -> Tensor:
    """Equal numbers have no code at their centre: they take n = 8, or 7 below zero, half a step off it."""
    half = torch.where(least < 0, -0.5, 0.5)
    return half.masked_fill(least != most, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups of dims of tokens, each with its own parameters, so that a token can move alone.

    n: [..., D] uint8 codes; s, z: [..., groups(D)] uint8 codes of scale and centre
    """

    n: Tensor
    s: Tensor
    z: Tensor

    @classmethod
    def encode(cls, x: Tensor) -> Groups:
        """[..., D] numbers."""
        parts = [encode_group(part) for part in x.split(GROUP, -1)]
        n = torch.cat([part[0] for part in parts], -1)
        s, z = (torch.stack([part[i] for part in parts], -1) for i in (1, 2))
        return cls(n.to(torch.uint8), s.to(torch.uint8), z.to(torch.uint8))

    def decode(self) -> Tensor:
        """[..., D] fp32."""
        parts = zip(self.n.split(GROUP, -1), self.s.unbind(-1), self.z.unbind(-1), strict=True)
        return torch.cat([decode_group(n, s, z) for n, s, z in parts], -1)
