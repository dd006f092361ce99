"""Rows of a quantised matrix: integer codes, and their values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

SUPER_COLUMNS = 256


class CodeRule(Enum):
    """The value of a code q; s, z and m are those of its row and group of columns.

    SCALE   s (q - c): c the middle code, 0 of 8 bits (q signed); s table[q], with a table
    ZERO    s (q - z)
    MIN     s q + m
    SUPER   d a q - e b: bytes a, b per 32 columns, or 16 of 2 bits; d, e per 256 (Q4_K, Q5_K, Q2_K)
    SIGNED  d a (q - c): a per 16 columns, d per 256 (Q6_K, Q3_K)
    """

    SCALE = 0
    ZERO = 1
    MIN = 2
    SUPER = 3
    SIGNED = 4

    @property
    def has_supers(self) -> bool:
        return self in (CodeRule.SUPER, CodeRule.SIGNED)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """N rows of K columns.

    codes:   [N, K] uint8, below 2 ** bits; int8 where bits is 8
    group:   columns G that share a scale
    scales:  [N, K / G] fp16 or fp32; SUPER: [N, K / G, 2] uint8 (a, b); SIGNED: [N, K / G] int8
    offsets: ZERO: [N, K / G] uint8; MIN: like scales; else None
    supers:  SUPER: [N, K / 256, 2] fp16 (d, e); SIGNED: [N, K / 256] fp16; else None
    table:   [16] fp32, or None
    """

    codes: Tensor
    bits: int
    grid: CodeRule
    group: int
    scales: Tensor
    offsets: Tensor | None = None
    supers: Tensor | None = None
    table: Tensor | None = None

    def select(self, rows: Tensor) -> PackedRows:
        """The rows of an index [n], in its order."""
        parts = {name: getattr(self, name) for name in ("codes", "scales", "offsets", "supers")}
        return replace(self, **{name: x[rows] for name, x in parts.items() if x is not None})

    def dequantised(self) -> Tensor:
        """[N, K] fp32, by the formulas of CodeRule."""
        codes = self.codes.float() if self.table is None else self.table[self.codes.long()]
        if self.grid is CodeRule.SUPER:
            d, e = (self._wide(x, SUPER_COLUMNS) for x in _given(self.supers).unbind(-1))
            a, b = (self._wide(x, self.group) for x in self.scales.unbind(-1))
            return d * a * codes - e * b
        scales = self._wide(self.scales, self.group)
        if self.grid is CodeRule.SIGNED:
            scales = self._wide(_given(self.supers), SUPER_COLUMNS) * scales
        if self.grid in (CodeRule.SCALE, CodeRule.SIGNED):
            centre = 0 if self.table is not None or self.bits == 8 else 2 ** (self.bits - 1)
            return (codes - centre) * scales
        offsets = self._wide(_given(self.offsets), self.group)
        return (codes - offsets) * scales if self.grid is CodeRule.ZERO else codes * scales + offsets

    @staticmethod
    def _wide(x: Tensor, group: int) -> Tensor:
        return x.float().repeat_interleave(group, 1)


def _given(x: Tensor | None) -> Tensor:
    if x is None:
        raise ValueError("a packed matrix of this grid has offsets or supers, and this one has none")
    return x


def nibbles(words: Tensor) -> Tensor:
    """int32 [.., W] -> uint8 [.., W, 8]: nibble i in bits 4 i to 4 i + 3."""
    pairs = words.clone(memory_format=torch.contiguous_format).view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
