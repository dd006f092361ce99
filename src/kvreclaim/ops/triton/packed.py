"""Products with packed weights on a GPU: w4a16, as the literature calls those of 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.packed import PackedMatrix
from kvreclaim.ops.triton.packed_kernels import packed_product_kernel, sum_kernel, unpack_kernel
from kvreclaim.ops.triton.support import dot_precision, keeps_16_bits, new_output, num_processors

FEW_ROWS = 64
"""From so many rows on weights become numbers once, and torch multiplies."""
BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 64
LEAST_STEP = 256
"""Columns of K that one program sums at least, where K is split to keep all processors busy."""
UNPACK_BLOCK = SUM_BLOCK = 1024


def packed_linear(
    x: Tensor,
    matrices: Sequence[PackedMatrix],
    bias: Tensor | None = None,
    *,
    activations: str = "dtype",
    residual: Tensor | None = None,
) -> Tensor:
    """x [.., K], bias [sum of N] -> [.., sum of N], the outputs of the matrices side by side, of x's dtype.

    residual: contiguous, like the result, to which it is added
    activations: "dtype" rounds weights to x's dtype and multiplies there; "exact" multiplies in fp32. Sums
        are fp32 either way
    Fewer than FEW_ROWS rows read the codes; more multiply the matrix as numbers, in scratch memory.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    widths = [matrix.out_features for matrix in matrices]
    out = new_output(x, rows.shape[0], sum(widths))
    starts = accumulate(widths, initial=0)
    for matrix, start in zip(matrices, starts, strict=False):
        if rows.shape[0]:
            sums = _products(rows, matrix, activations == "exact")
            if (
                sums.shape == (1, *out.shape)
                and sums.dtype is out.dtype
                and bias is None
                and residual is None
            ):
                out = sums[0]
            else:
                add_up(sums, out, start, bias, residual)
    return out.to(x.dtype).view(*x.shape[:-1], -1)


def add_up(
    sums: Tensor, out: Tensor, start: int = 0, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Columns of out from `start` on: sums [parts, M, N] in one, with those of bias and residual."""
    parts, count, width = sums.shape
    sum_kernel[(count, triton.cdiv(width, SUM_BLOCK))](
        sums,
        sums if bias is None else bias[start:],
        sums if residual is None else residual.view(out.shape)[:, start:],
        out[:, start:],
        parts,
        count,
        width,
        out.shape[1],
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK=SUM_BLOCK,
    )


def unpack_rows(matrix: PackedMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n] int64 of a matrix as numbers: [n, K] of fp32, bf16 or fp16."""
    out = new_output(ids.new_empty(0, dtype=dtype), ids.shape[0], matrix.in_features)
    if ids.shape[0]:
        grid = (ids.shape[0], triton.cdiv(matrix.in_features, UNPACK_BLOCK))
        unpack_kernel[grid](
            *_parts(matrix),
            ids.contiguous(),
            out,
            matrix.in_features,
            matrix.group,
            matrix.codes,
            matrix.grid.value,
            BLOCK_K=UNPACK_BLOCK,
        )
    return out.to(dtype)


def _products(rows: Tensor, matrix: PackedMatrix, is_exact: bool) -> Tensor:
    """[parts, M, N], in fp32 or x's dtype."""
    if rows.shape[0] >= FEW_ROWS:
        dtype = torch.float32 if is_exact else rows.dtype
        ids = torch.arange(matrix.out_features, device=rows.device)
        return functional.linear(rows.to(dtype), unpack_rows(matrix, ids, dtype))[None]
    (count, columns), out = rows.shape, matrix.out_features
    tiles = triton.cdiv(count, BLOCK_M) * triton.cdiv(out, BLOCK_N)
    num_splits = max(1, 2 * num_processors(rows.device) // tiles)
    step = max(LEAST_STEP, triton.cdiv(triton.cdiv(columns, num_splits), BLOCK_K) * BLOCK_K)
    parts = triton.cdiv(columns, step)
    sums = torch.empty((parts, count, out), dtype=torch.float32, device=rows.device)
    keeps = keeps_16_bits(rows.dtype) and not is_exact
    packed_product_kernel[(triton.cdiv(count, BLOCK_M), triton.cdiv(out, BLOCK_N), parts)](
        rows if keeps else rows.float(),
        *_parts(matrix),
        sums,
        count,
        out,
        columns,
        matrix.group,
        step,
        matrix.codes,
        matrix.grid.value,
        DTYPE=_KINDS[rows.dtype] if keeps else tl.float32,
        PRECISION=dot_precision(rows.device),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
    )
    return sums


_KINDS: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _parts(matrix: PackedMatrix) -> list[Tensor]:
    """Tensors of a matrix; the codes stand in for a missing one, which the kernel does not read."""
    data = matrix.parts["data"]
    parts = [matrix.parts.get(name, data) for name in ("data", "scales", "offsets", "supers")]
    return [*parts, data if matrix.table is None else matrix.table]
