"""Groups of 4-bit codes around a centre: x = s (n + (z / steps - 7.5)), n = 0 ... 15.

The scale s is a code (scales.py); the centre z is a whole number of s / steps, so both together take two
bytes or less. The error is at most s/2 with s = (max - min) / 15, as long as the centre is not far from zero
(KEY_GRID: up to 2.7 times the range; VALUE_GRID: wherever the values straddle zero); beyond, s grows with the
centre, and the error is half of that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvreclaim.kv_bytes import GROUP
from kvreclaim.ops.formats import scales
from kvreclaim.ops.formats.scales import ScaleCode

LIMIT = 1e30
"""Numbers are bounded before anything is computed of them; every format clips far below."""


def bounded(x: Tensor) -> Tensor:
    """fp32; NaN becomes 0 and anything beyond LIMIT is cut: what all codecs start with."""
    return x.float().nan_to_num(0.0, LIMIT, -LIMIT).clamp(-LIMIT, LIMIT)


@dataclass(frozen=True, slots=True)
class CodeGrid:
    """Which scales and centres a group may have.

    scale:     the codes of s
    steps:     steps of the centre in s
    reach:     s is at least abs(centre) / reach
    low, high: of z; its code is z - low, from 0
    has_zero:  z code 0 stands for a group of zeros (so that cleared memory is zeros), z is above `low` else
    """

    scale: ScaleCode
    steps: int
    reach: float
    low: int
    high: int
    has_zero: bool

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Groups along the last dim.

        x: [..., g] any float dtype. Returns: n [..., g], code of s [...], code of z [...], all int32.
        """
        x = bounded(x)
        least, most = x.aminmax(dim=-1, keepdim=True)
        centre = (least + most) / 2
        code = self.scale.encode(torch.maximum((most - least) / 15, centre.abs() / self.reach))
        scale = self.scale.decode(code)
        first = self.low + 1 if self.has_zero else self.low
        z = torch.round(self.steps * (centre / scale - _half(least, most))).clamp(first, self.high)
        n = torch.round(x / scale - (z / self.steps - 7.5)).clamp(0, 15)
        if self.has_zero:
            nothing = (least == 0) & (most == 0)
            z, n = z.masked_fill(nothing, self.low), n.masked_fill(nothing, 0)
            code = code.masked_fill(nothing, 0)
        return n.to(torch.int32), code[..., 0], (z[..., 0] - self.low).to(torch.int32)

    def decode(self, n: Tensor, scale: Tensor, centre: Tensor) -> Tensor:
        """Invert encode: [..., g], [...], [...] integers. Returns: [..., g] fp32."""
        step = self.scale.decode(scale)
        if self.has_zero:
            step = step.masked_fill(centre == 0, 0.0)
        first = (centre.float() + self.low) / self.steps - 7.5
        return step[..., None] * (n.float() + first[..., None])


def _half(least: Tensor, most: Tensor) -> Tensor:
    """Equal numbers have no code at their centre: they take n = 8, or 7 below zero, half a step beside it."""
    half = torch.where(least < 0, -0.5, 0.5)
    return half.masked_fill(least != most, 0.0)


KEY_GRID = CodeGrid(scales.INT4, steps=3, reach=40.5, low=-128, high=127, has_zero=True)
"""int4's groups, keys and values. reach is such that z still fits after s has been rounded down:
3 * 40.5 * 2^(1/16) = 126.9."""
CHANNEL_GRID = CodeGrid(scales.KIVI_KEYS, steps=3, reach=40.5, low=-128, high=127, has_zero=True)
"""kivi4's sealed keys: the tokens of a block in one channel."""
VALUE_GRID = CodeGrid(scales.KIVI_VALUES, steps=2, reach=7.5, low=-16, high=15, has_zero=False)
"""kivi4's values: 13 bits a group. Zeros are n = 8, z = -1."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups of dims of tokens, each with its own parameters, so that a token can move alone.

    n: [..., D] uint8 codes; s, z: [..., groups(D)] uint8 codes of scale and centre
    """

    n: Tensor
    s: Tensor
    z: Tensor

    @classmethod
    def encode(cls, x: Tensor, grid: CodeGrid) -> Groups:
        """[..., D] numbers."""
        parts = [grid.encode(part) for part in x.split(GROUP, -1)]
        n = torch.cat([part[0] for part in parts], -1)
        s, z = (torch.stack([part[i] for part in parts], -1) for i in (1, 2))
        return cls(n.to(torch.uint8), s.to(torch.uint8), z.to(torch.uint8))

    def decode(self, grid: CodeGrid) -> Tensor:
        """[..., D] fp32."""
        parts = zip(self.n.split(GROUP, -1), self.s.unbind(-1), self.z.unbind(-1), strict=True)
        return torch.cat([grid.decode(n, s, z) for n, s, z in parts], -1)

    def take(self, index: tuple[Tensor, ...]) -> Groups:
        """The tokens at these places of the leading dims."""
        return Groups(*(getattr(self, field.name)[index] for field in fields(self)))

    def where(self, mask: Tensor, other: Groups) -> Groups:
        """These where mask [...] is true, else the other's."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Groups(*(torch.where(mask[..., None], mine, theirs) for mine, theirs in pairs))
