"""Rows of a linear layer in the formats of AutoAWQ, GPTQ, compressed-tensors and bitsandbytes.

Each function reads rows first to last - 1 of the weight [N, K] from the tensors of a layer.
Sources: AWQ, arXiv 2306.00978; GPTQ, arXiv 2210.17323; compressed-tensors' pack_quantized; QLoRA (nf4), arXiv
2305.14314.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.weights.packed import CodeRule, PackedRows, nibbles

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of nibble i in a word of eight."""
WORD = 8
Read = Callable[[str], Any]
"""A tensor of the layer by its name's suffix, as an object that is sliced before it is read."""


def awq_rows(read: Read, first: int, last: int) -> PackedRows:
    """qweight [K, N / 8], qzeros [K / G, N / 8], scales [K / G, N]; first and last are multiples of 8."""
    order = torch.tensor(AWQ_ORDER).argsort()
    words = slice(first // WORD, last // WORD)
    codes = nibbles(read("qweight")[:, words])[..., order].flatten(-2).T.contiguous()
    zeros = nibbles(read("qzeros")[:, words])[..., order].flatten(-2).T.contiguous()
    scales = stored_scales(read("scales")[:])[:, first:last].T.contiguous()
    return PackedRows(codes, 4, CodeRule.ZERO, codes.shape[1] // scales.shape[1], scales, zeros)


def gptq_rows(read: Read, first: int, last: int, *, is_v1: bool) -> PackedRows:
    """qweight [K / 8, N], qzeros [K / G, N / 8] (less one in v1), scales [K / G, N]; multiples of 8."""
    codes = nibbles(read("qweight")[:, first:last].T.contiguous()).flatten(-2)
    words = read("qzeros")[:]
    scales = stored_scales(read("scales")[:])[:, first:last].T.contiguous()
    group = codes.shape[1] // scales.shape[1]
    if bool((words == (0x77777777 if is_v1 else -0x77777778)).all()):  # zeros of 8, in all pieces
        return PackedRows(codes, 4, CodeRule.SCALE, group, scales)
    zeros = nibbles(words[:, first // WORD : last // WORD]).flatten(-2).T.contiguous()
    return PackedRows(codes, 4, CodeRule.ZERO, group, scales, zeros + 1 if is_v1 else zeros)


def compressed_rows(read: Read, first: int, last: int, *, is_symmetric: bool) -> PackedRows:
    """weight_packed [N, K / 8], weight_scale [N, K / G], weight_zero_point [N / 8, K / G] of a layer that is
    not symmetric; multiples of 8."""
    codes = nibbles(read("weight_packed")[first:last]).flatten(-2)
    columns = int(read("weight_shape")[:][1])
    codes = codes[:, :columns].contiguous()
    scales = stored_scales(read("weight_scale")[:])[first:last]
    group = columns // scales.shape[1]
    if is_symmetric:
        return PackedRows(codes, 4, CodeRule.SCALE, group, scales)
    words = read("weight_zero_point")[first // WORD : last // WORD]
    zeros = nibbles(words).movedim(-1, 1).flatten(0, 1).contiguous()
    return PackedRows(codes, 4, CodeRule.ZERO, group, scales, zeros)


def nf4_rows(read: Read, first: int, last: int, *, state: Mapping[str, Any], columns: int) -> PackedRows:
    """weight [N K / 2, 1] uint8, the first of two columns in the high nibble; absmax of G numbers in fp32, or
    as bytes of a second table (nested).

    state: bitsandbytes' quant_state: blocksize, and nested_blocksize, nested_offset where absmax is nested
    """
    block = int(state["blocksize"])
    begin, end = first * columns, last * columns
    if columns % block:
        raise InvalidArgumentError(
            f"a bitsandbytes layer of {columns} columns has blocks of {block} that reach over rows; "
            "kvreclaim reads layers whose columns are a multiple of the block: convert it to another format."
        )
    pairs = read("weight")[begin // 2 : end // 2].reshape(-1)
    codes = torch.stack([pairs >> 4, pairs & 15], -1).view(last - first, columns)
    absmax = read("weight.absmax")[begin // block : end // block]
    if absmax.dtype == torch.uint8:
        nested = int(state["nested_blocksize"])
        place = torch.arange(begin // block, end // block) // nested
        levels, sizes = read("weight.nested_quant_map")[:], read("weight.nested_absmax")[:]
        absmax = levels[absmax.long()] * sizes[place] + float(state["nested_offset"])
    table = read("weight.quant_map")[:].float()
    scales = absmax.float().view(last - first, columns // block)
    return PackedRows(codes, 4, CodeRule.SCALE, block, scales, table=table)


def stored_scales(scales: Tensor) -> Tensor:
    """Store all scales of a layer as fp16 where that is exact, else as fp32."""
    narrow = scales.to(torch.float16)
    return narrow if torch.equal(narrow.to(scales.dtype), scales) else scales.float()
