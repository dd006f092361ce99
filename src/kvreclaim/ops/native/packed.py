"""Products with packed weights on the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from kvreclaim.ops.extension import native
from kvreclaim.ops.packed import PackedMatrix

ACTIVATIONS = ("int8", "int16", "exact")
"""Rounding of x in a product: 8 or 15 bits, a scale per 32 columns, or nothing. The kernels' order."""


PANEL_ROWS = 64
"""Rows of a product with packed weights up to which none depends on their number (csrc packed_tiles.h)."""
leading_rows: ContextVar[int] = ContextVar("leading", default=0)
"""Leading rows that exact_rows() (decoder.py) sets."""


def packed_parts(num_rows: int) -> list[slice]:
    """Return the rows of products with packed weights, in calls: with AMX those that exact_rows() sets in
    calls of PANEL_ROWS at most, then the others; elsewhere no row depends on their number."""
    exact = min(num_rows, leading_rows.get()) if num_rows > PANEL_ROWS and native().isa() == "amx" else 0
    parts = [slice(i, min(i + PANEL_ROWS, exact)) for i in range(0, exact, PANEL_ROWS)]
    return parts + [slice(exact, num_rows)] * (exact < num_rows or not num_rows)


def packed_linear(
    x: Tensor, matrices: Sequence[PackedMatrix], bias: Tensor | None = None, *, activations: str = "int16"
) -> Tensor:
    """x [.., K] fp32 or bf16, bias [sum of N] -> [.., sum of N], the outputs of the matrices side by side.

    activations: "int8" and "int16" round x to 8 and 15 bits, with a scale per 32 columns, and multiply
        integers, which loses 1/254 and 1/32512 of the largest of 32 columns; "exact" multiplies weights in
        fp32
    With AMX, more than 64 rows are multiplied as sums of two bf16 numbers ("int16") or as one ("int8").
    A row's result does not depend on the other rows or the number of threads.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((rows.shape[0], sum(each.out_features for each in matrices)))
    kind, own = ACTIVATIONS.index(activations), [each.native for each in matrices]
    for part in packed_parts(rows.shape[0]):
        native().packed_linear(own, rows[part], bias, out[part], kind)
    return out.view(*x.shape[:-1], -1)


def unpack_rows(matrix: PackedMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n] int64 of a matrix as numbers: [n, K] of fp32 or bf16."""
    out = torch.empty((ids.shape[0], matrix.in_features), dtype=dtype)
    native().unpack_rows(matrix.native, ids.contiguous(), out)
    return out
