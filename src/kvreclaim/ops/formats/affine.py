"""Groups of 4-bit codes around a centre: x = s (n + (z / steps - 7.5)), n = 0 ... 15.

The scale s is a code (scales.py); the centre z is a whole number of s / steps, so both together take two
bytes or less. The error is at most s/2 with s = (max - min) / 15, as long as the centre is not far from zero
(KEY_GRID: up to 2.7 times the range; VALUE_GRID: wherever the values straddle zero); beyond, s grows with the
centre, and the error is half of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.ops.formats import scales
from kvreclaim.ops.formats.scales import ScaleCode

LIMIT = 1e30
"""Numbers are bounded before anything is computed of them; every format clips far below."""


def bounded(x: Tensor) -> Tensor:
    """fp32; NaN becomes 0 and anything beyond LIMIT is cut: what all codecs start with."""
    return x.float().nan_to_num(0.0, LIMIT, -LIMIT).clamp(-LIMIT, LIMIT)


@dataclass(frozen=True, slots=True)
class Grid:
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
        """What encode returned: [..., g], [...], [...] integers. Returns: [..., g] fp32."""
        step = self.scale.decode(scale)
        if self.has_zero:
            step = step.masked_fill(centre == 0, 0.0)
        first = (centre.float() + self.low) / self.steps - 7.5
        return step[..., None] * (n.float() + first[..., None])


def _half(least: Tensor, most: Tensor) -> Tensor:
    """Equal numbers have no code at their centre: they take n = 8, or 7 below zero, half a step beside it."""
    half = torch.where(least < 0, -0.5, 0.5)
    return half.masked_fill(least != most, 0.0)


KEY_GRID = Grid(scales.INT4, steps=3, reach=40.5, low=-128, high=127, has_zero=True)
"""int4's groups, keys and values. reach is such that z still fits after s has been rounded down:
3 * 40.5 * 2^(1/16) = 126.9."""
CHANNEL_GRID = Grid(scales.KIVI_KEYS, steps=3, reach=40.5, low=-128, high=127, has_zero=True)
"""kivi4's sealed keys: the tokens of a block in one channel."""
VALUE_GRID = Grid(scales.KIVI_VALUES, steps=2, reach=7.5, low=-16, high=15, has_zero=False)
"""kivi4's values: 13 bits a group. Zeros are n = 8, z = -1."""
