"""Rows of a tensor of a GGUF file, in the block formats of llama.cpp (ggml/src/ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.weights.packed import CodeRule, PackedRows

IQ4 = [-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
"""Values of the codes of IQ4_NL and IQ4_XS."""


def _halfs(x: Tensor) -> Tensor:
    """uint8 [.., 2 n] -> fp16 [.., n]."""
    return x.contiguous().view(torch.float16)


def _fields(quants: Tensor, bits: int) -> Tensor:
    """[.., B] bytes -> [.., 8 / bits B]: all lowest fields of `bits` bits, then all second ones, ..."""
    word = torch.int64 if quants.shape[-1] % 8 == 0 else torch.int32
    words = quants.clone(memory_format=torch.contiguous_format).view(word)  # aligned
    mask = int.from_bytes(bytes([2**bits - 1]) * words.itemsize)
    fields = words.new_empty((*words.shape[:-1], 8 // bits, words.shape[-1]))
    for i in range(8 // bits):
        torch.bitwise_and(words >> bits * i, mask, out=fields.select(-2, i))
    return fields.view(torch.uint8).flatten(-2)


def _row(quants: Tensor, bits: int) -> Tensor:
    """[.., B] bytes -> [.., 8 / bits B]: the fields of a byte, lowest first, then those of the next."""
    word = {1: torch.int64, 2: torch.int32, 4: torch.int16}[bits]
    of_byte = _fields(torch.arange(256, dtype=torch.uint8), bits).view(-1, 256).T.contiguous()
    words = of_byte.view(word)[:, 0].index_select(0, quants.flatten().int())
    return words.view(quants.shape).view(torch.uint8)


def _q4_0(blocks: Tensor) -> PackedRows:
    """d, 16 bytes: (q - 8) d."""
    codes = _fields(blocks[..., 2:], 4).flatten(1)
    return PackedRows(codes, 4, CodeRule.SCALE, 32, _halfs(blocks[..., :2])[..., 0])


def _q4_1(blocks: Tensor) -> PackedRows:
    """d, m, 16 bytes: q d + m."""
    d, m = _halfs(blocks[..., :4]).unbind(-1)
    codes = _fields(blocks[..., 4:], 4).flatten(1)
    return PackedRows(codes, 4, CodeRule.MIN, 32, d.contiguous(), m.contiguous())


def _q5_0(blocks: Tensor) -> PackedRows:
    """d, 4 bytes of fifth bits, 16 bytes: (q - 16) d."""
    codes = _fields(blocks[..., 6:], 4) | _row(blocks[..., 2:6], 1) << 4
    return PackedRows(codes.flatten(1), 5, CodeRule.SCALE, 32, _halfs(blocks[..., :2])[..., 0])


def _q5_1(blocks: Tensor) -> PackedRows:
    """d, m, 4 bytes of fifth bits, 16 bytes: q d + m."""
    d, m = _halfs(blocks[..., :4]).unbind(-1)
    codes = _fields(blocks[..., 8:], 4) | _row(blocks[..., 4:8], 1) << 4
    return PackedRows(codes.flatten(1), 5, CodeRule.MIN, 32, d.contiguous(), m.contiguous())


def _q8_0(blocks: Tensor) -> PackedRows:
    """d, 32 signed bytes: q d."""
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return PackedRows(codes, 8, CodeRule.SCALE, 32, _halfs(blocks[..., :2])[..., 0])


def _q2_k(blocks: Tensor) -> PackedRows:
    """16 bytes of 4-bit scales and mins, 64 bytes, d, dmin; sub-blocks of 16."""
    s = blocks[..., :16]
    codes = _fields(blocks[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(1)
    scales = torch.stack([s & 15, s >> 4], -1).flatten(1, 2)
    return PackedRows(codes, 2, CodeRule.SUPER, 16, scales, supers=_halfs(blocks[..., 80:]))


def _q3_k(blocks: Tensor) -> PackedRows:
    """32 bytes of third bits, 64 bytes, 12 bytes of 16 6-bit scales, d."""
    low = _fields(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-2)
    codes = (low | _fields(blocks[..., :32], 1) << 2).flatten(1)
    scales = _fields(blocks[..., 96:104], 4) | _fields(blocks[..., 104:108], 2) << 4
    scales = (scales.view(torch.int8) - 32).flatten(1)
    return PackedRows(codes, 3, CodeRule.SIGNED, 16, scales, supers=_halfs(blocks[..., 108:])[..., 0])


def _scales_and_mins(s: Tensor) -> Tensor:
    """12 bytes of Q4_K and Q5_K -> [N, K / 32, 2] of 6 bits."""
    low, high, rest = s[..., :4], s[..., 4:8], s[..., 8:]
    a = torch.cat([low & 63, (rest & 15) | (low >> 6) << 4], -1)
    b = torch.cat([high & 63, (rest >> 4) | (high >> 6) << 4], -1)
    return torch.stack([a, b], -1).flatten(1, 2)


def _q4_k(blocks: Tensor) -> PackedRows:
    """d, dmin, 12 bytes of 6-bit scales and mins, 128 bytes; sub-blocks of 32."""
    codes = _fields(blocks[..., 16:].unflatten(-1, (4, 32)), 4).flatten(1)
    scales = _scales_and_mins(blocks[..., 4:16])
    return PackedRows(codes, 4, CodeRule.SUPER, 32, scales, supers=_halfs(blocks[..., :4]))


def _q5_k(blocks: Tensor) -> PackedRows:
    """Q4_K's, with 32 bytes of fifth bits before its 128."""
    low = _fields(blocks[..., 48:].unflatten(-1, (4, 32)), 4).flatten(-2)
    codes = (low | _fields(blocks[..., 16:48], 1) << 4).flatten(1)
    scales = _scales_and_mins(blocks[..., 4:16])
    return PackedRows(codes, 5, CodeRule.SUPER, 32, scales, supers=_halfs(blocks[..., :4]))


def _q6_k(blocks: Tensor) -> PackedRows:
    """ql[128], qh[64], 16 signed scales, d."""
    low = _fields(blocks[..., :128].unflatten(-1, (2, 64)), 4)  # halves of 128 columns
    codes = (low | _fields(blocks[..., 128:192].unflatten(-1, (2, 32)), 2) << 4).flatten(1)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return PackedRows(codes, 6, CodeRule.SIGNED, 16, scales, supers=_halfs(blocks[..., 208:])[..., 0])


def _iq4_nl(blocks: Tensor) -> PackedRows:
    """d, 16 bytes: d table[q]."""
    codes = _fields(blocks[..., 2:], 4).flatten(1)
    return PackedRows(codes, 4, CodeRule.SCALE, 32, _halfs(blocks[..., :2])[..., 0], table=torch.tensor(IQ4))


def _iq4_xs(blocks: Tensor) -> PackedRows:
    """d, 6 bytes of 8 6-bit scales, 128 bytes: d (a - 32) table[q]."""
    codes = _fields(blocks[..., 8:].unflatten(-1, (8, 16)), 4).flatten(1)
    a = (_row(blocks[..., 4:8], 4) | _row(blocks[..., 2:4], 2) << 4).view(torch.int8) - 32
    scales = (_halfs(blocks[..., :2]).float() * a).flatten(1)
    return PackedRows(codes, 4, CodeRule.SCALE, 32, scales, table=torch.tensor(IQ4))


@dataclass(frozen=True)
class BlockFormat:
    """columns in num_bytes bytes, and the reader of such blocks, uint8 [N, K / columns, num_bytes]."""

    columns: int
    num_bytes: int
    read: Callable[[Tensor], PackedRows]


FORMATS = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, _iq4_xs),
}


def ggml_rows(name: str, data: Tensor) -> PackedRows:
    """Read the rows of uint8 [N, bytes of a row] of a type of FORMATS."""
    form = FORMATS[name]
    return form.read(data.view(data.shape[0], -1, form.num_bytes))
