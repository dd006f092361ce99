"""Rows of a tensor of a GGUF file, in the block formats of llama.cpp (ggml/src/ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.weights.packed import Grid, PackedRows


def _halfs(x: Tensor) -> Tensor:
    """uint8 [.., 2 n] -> fp16 [.., n]."""
    return x.contiguous().view(torch.float16)


def _split(quants: Tensor) -> Tensor:
    """[.., B] bytes -> [.., 2 B]: all low nibbles, then all high ones."""
    return torch.cat([quants & 15, quants >> 4], -1)


def _q4_0(blocks: Tensor) -> PackedRows:
    """d, 16 bytes: (q - 8) d."""
    codes = _split(blocks[..., 2:]).flatten(1)
    return PackedRows(codes, 4, Grid.SCALE, 32, _halfs(blocks[..., :2])[..., 0])


def _q4_1(blocks: Tensor) -> PackedRows:
    """d, m, 16 bytes: q d + m."""
    d, m = _halfs(blocks[..., :4]).unbind(-1)
    return PackedRows(_split(blocks[..., 4:]).flatten(1), 4, Grid.MIN, 32, d.contiguous(), m.contiguous())


def _q8_0(blocks: Tensor) -> PackedRows:
    """d, 32 signed bytes: q d."""
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return PackedRows(codes, 8, Grid.SCALE, 32, _halfs(blocks[..., :2])[..., 0])


def _q4_k(blocks: Tensor) -> PackedRows:
    """d, dmin, 12 bytes of 6-bit scales and mins, 128 bytes; sub-blocks of 32."""
    s = blocks[..., 4:16]
    low, high, rest = s[..., :4], s[..., 4:8], s[..., 8:]
    a = torch.cat([low & 63, (rest & 15) | (low >> 6) << 4], -1)
    b = torch.cat([high & 63, (rest >> 4) | (high >> 6) << 4], -1)
    codes = _split(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1)
    scales = torch.stack([a, b], -1).flatten(1, 2)
    return PackedRows(codes, 4, Grid.SUPER, 32, scales, supers=_halfs(blocks[..., :4]))


def _q6_k(blocks: Tensor) -> PackedRows:
    """ql[128], qh[64], 16 signed scales, d."""
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # halves of 128 columns, 64 bytes each
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    quarters = [
        (low[..., 0, :] & 15) | (high & 3) << 4,
        (low[..., 1, :] & 15) | (high >> 2 & 3) << 4,
        (low[..., 0, :] >> 4) | (high >> 4 & 3) << 4,
        (low[..., 1, :] >> 4) | (high >> 6) << 4,
    ]
    codes = torch.stack(quarters, -2).flatten(1)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return PackedRows(codes, 6, Grid.SUPER, 16, scales, supers=_halfs(blocks[..., 208:])[..., 0])


@dataclass(frozen=True)
class BlockFormat:
    """columns in num_bytes bytes, and what reads such blocks, uint8 [N, K / columns, num_bytes]."""

    columns: int
    num_bytes: int
    read: Callable[[Tensor], PackedRows]


FORMATS = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}


def ggml_rows(name: str, data: Tensor) -> PackedRows:
    """The rows of uint8 [N, bytes of a row] of a type of FORMATS."""
    form = FORMATS[name]
    return form.read(data.view(data.shape[0], -1, form.num_bytes))
