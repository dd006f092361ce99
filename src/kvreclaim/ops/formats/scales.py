"""Scales as logarithmic codes, always rounded down: a few steps an octave instead of a number.

Rounded down, a scale s' is at most the ideal s of its vector, so a rounding error of s'/2 is
within s/2; the step is so small that the greatest code is still reached (127 s/s' < 127.5). A code's scale is
one product of two numbers from tables of 16, times a power of two: equal bits in every back-end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SLACK = 2**-10
"""Added before rounding down, so that the scale of a code has that code again, whatever log2 returns."""


@dataclass(frozen=True, slots=True)
class ScaleCode:
    """s = 2^(c / steps - bias) for a code c of 0 ... last.

    Below the smallest scale the smallest is taken, above the largest the largest.
    """

    steps: int
    bias: int
    last: int

    def encode(self, scale: Tensor) -> Tensor:
        """Scales >= 0 of any shape: int32 codes, rounded down; NaN has code 0.

        fp32 scales, their logarithm in fp64: every back-end then comes to the same code.
        """
        bounded = scale.float().nan_to_num(0.0).double().clamp(2.0**-self.bias, 2.0**64)
        code = torch.floor(self.steps * (torch.log2(bounded) + self.bias) + SLACK)
        return code.clamp(0, self.last).to(torch.int32)

    def decode(self, code: Tensor) -> Tensor:
        """Return the scales of integer codes: fp32."""
        return self.table(code.device)[code.long()]

    def table(self, device: torch.device) -> Tensor:
        """Return the scale of every code: [last + 1] fp32."""
        return _table(self.steps, self.bias, self.last, device)


@cache
def _table(steps: int, bias: int, last: int, device: torch.device) -> Tensor:
    octave = [_fraction(part, steps) for part in range(steps)]
    return torch.tensor(
        [octave[c % steps] * 2.0 ** (c // steps - bias) for c in range(last + 1)], device=device
    )


def sixteenths() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """2^(i / 16) and 2^(i / 256), i = 0 ... 15, as fp32: a scale of 16 steps an octave is a number of the
    first, one of 256 steps the product of one of each; both times a power of two."""
    first, second = ([_fp32(2.0 ** (i / steps)) for i in range(16)] for steps in (16, 256))
    return tuple(first), tuple(second)


def _fraction(part: int, steps: int) -> float:
    """2^(part / steps), of 16 or 256 steps, by the tables."""
    coarse, fine = sixteenths()
    return coarse[part] if steps == 16 else _fp32(coarse[part // 16] * fine[part % 16])


def _fp32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


INT8 = ScaleCode(steps=256, bias=13, last=4095)
"""Steps of a symmetric vector in bytes: amax / 127, from 1.2e-4 to 8."""
FP8 = ScaleCode(steps=256, bias=15, last=4095)
"""amax / 448, from 3.1e-5 to 2."""
TURBO = ScaleCode(steps=256, bias=9, last=4095)
"""Root mean square of a vector, from .002 to 128; code 0 stands for a vector of zeros."""
INT4 = ScaleCode(steps=16, bias=10, last=255)
"""Steps of a group of 4-bit codes, from .001 to 61."""
