"""Packed rows of random codes: every kind that the kernels know."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.weights.packed import CodeRule, PackedRows

KINDS_OF_256 = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
"""Kinds whose scales are numbers of a scale of 256 columns."""
KINDS = ("scale", "scale-wide", "zero", "min", "table", "q8_0", "q5_0", "q5_1", *KINDS_OF_256)


def random_rows(kind: str, out: int, columns: int, group: int = 64, seed: int = 1) -> PackedRows:
    """N = out rows of K = columns, of a kind of KINDS, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def codes(below: int) -> Tensor:
        return whole(below, out, columns)

    def numbers(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) * 0.1 + 0.01).half()

    def whole(below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=generator).to(torch.uint8)

    scales = numbers(out, columns // group)
    if kind == "scale":
        return PackedRows(codes(16), 4, CodeRule.SCALE, group, scales)
    if kind == "scale-wide":
        return PackedRows(codes(16), 4, CodeRule.SCALE, group, scales.float() * 1.000123)
    if kind == "zero":
        return PackedRows(codes(16), 4, CodeRule.ZERO, group, scales, whole(17, out, columns // group))
    if kind == "min":
        return PackedRows(codes(16), 4, CodeRule.MIN, group, scales, -numbers(out, columns // group) * 8)
    if kind in ("q2_k", "q4_k", "q5_k"):
        bits, small = int(kind[1]), 16 if kind == "q2_k" else 32
        a, d = whole(64, out, columns // small, 2), numbers(out, columns // 256, 2)
        return PackedRows(codes(2**bits), bits, CodeRule.SUPER, small, a, supers=d)
    if kind in ("q3_k", "q6_k"):
        bits, a = int(kind[1]), whole(256, out, columns // 16).view(torch.int8)
        return PackedRows(codes(2**bits), bits, CodeRule.SIGNED, 16, a, supers=numbers(out, columns // 256))
    if kind == "q5_0":
        return PackedRows(codes(32), 5, CodeRule.SCALE, 32, numbers(out, columns // 32))
    if kind == "q5_1":
        scales = numbers(out, columns // 32)
        return PackedRows(codes(32), 5, CodeRule.MIN, 32, scales, -numbers(out, columns // 32) * 16)
    if kind == "table":
        table = torch.rand(16, generator=generator) * 2 - 1
        return PackedRows(codes(16), 4, CodeRule.SCALE, group, scales.float(), table=table)
    assert kind == "q8_0", f"{kind} is none of {KINDS}"
    return PackedRows(codes(256).view(torch.int8), 8, CodeRule.SCALE, 32, numbers(out, columns // 32))
