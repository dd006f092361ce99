"""Rows of a quantised matrix: small whole numbers, and what each of them stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

SUPER_COLUMNS = 256
CENTRES = {4: 8, 6: 32, 8: 0}
"""Of the bits of a code: the code of zero, where a grid has no zeros of its own."""


class Grid(Enum):
    """What number a code q stands for; s, z and m are those of its row and group of columns.

    SCALE   s (q - 8), 4 bits; s q, 8 bits (q signed); s table[q], with a table
    ZERO    s (q - z)
    MIN     s q + m
    SUPER   d a q - e b: bytes a, b per 32 columns, d, e per 256 (Q4_K); d a (q - 32): a per 16 columns (Q6_K)
    """

    SCALE = 0
    ZERO = 1
    MIN = 2
    SUPER = 3


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """N rows of K columns.

    codes:   [N, K] uint8, below 2 ** bits; int8 where bits is 8
    group:   columns G that share a scale
    scales:  [N, K / G] fp16 or fp32; SUPER: [N, K / 32, 2] uint8 (a, b), or [N, K / 16] int8 of 6 bits
    offsets: ZERO: [N, K / G] uint8; MIN: like scales; else None
    supers:  SUPER: [N, K / 256, 2] fp16 (d, e), or [N, K / 256] of 6 bits; else None
    table:   [16] fp32, or None
    """

    codes: Tensor
    bits: int
    grid: Grid
    group: int
    scales: Tensor
    offsets: Tensor | None = None
    supers: Tensor | None = None
    table: Tensor | None = None

    @property
    def is_of_six(self) -> bool:
        return self.bits == 6

    def select(self, rows: Tensor) -> PackedRows:
        """The rows of an index [n], in its order."""
        parts = {name: getattr(self, name) for name in ("codes", "scales", "offsets", "supers")}
        return replace(self, **{name: x[rows] for name, x in parts.items() if x is not None})

    def dequantised(self) -> Tensor:
        """[N, K] fp32, by the formulas of Grid."""
        codes = self.codes.float() if self.table is None else self.table[self.codes.long()]
        if self.grid is Grid.SUPER:
            return self._dequantised_supers(codes)
        scales = self._wide(self.scales, self.group)
        if self.grid is Grid.SCALE:
            centre = 0 if self.table is not None else CENTRES[self.bits]
            return (codes - centre) * scales
        offsets = self._wide(_given(self.offsets), self.group)
        return (codes - offsets) * scales if self.grid is Grid.ZERO else codes * scales + offsets

    def _dequantised_supers(self, codes: Tensor) -> Tensor:
        supers = _given(self.supers).float()
        if self.is_of_six:
            return (codes - 32) * self._wide(supers, SUPER_COLUMNS) * self._wide(self.scales, 16)
        d, e = (self._wide(x, SUPER_COLUMNS) for x in supers.unbind(-1))
        a, b = (self._wide(x, 32) for x in self.scales.unbind(-1))
        return d * a * codes - e * b

    @staticmethod
    def _wide(x: Tensor, group: int) -> Tensor:
        return x.float().repeat_interleave(group, 1)


def _given(x: Tensor | None) -> Tensor:
    if x is None:
        raise ValueError("a packed matrix of this grid has offsets or supers, and this one has none")
    return x


def nibbles(words: Tensor) -> Tensor:
    """int32 [.., W] -> uint8 [.., W, 8]: nibble i in bits 4 i to 4 i + 3."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)
