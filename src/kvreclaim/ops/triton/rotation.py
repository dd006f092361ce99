"""The rotation of int4's and turboquant4's tiles in registers: ops/formats/hadamard.py defines it."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard(x, BLOCK_D: tl.constexpr, LOG: tl.constexpr):
    """Every 2^LOG dims of x [rows, BLOCK_D] times the orthonormal Hadamard matrix of Sylvester's order.

    Each step replaces neighbours by their sum and their difference and puts all sums before all differences;
    after LOG of them each dim is where it began.
    """
    SIZE: tl.constexpr = 1 << LOG
    ROWS: tl.constexpr = x.shape[0] * BLOCK_D // SIZE
    HALF: tl.constexpr = SIZE // 2
    y = x
    for _ in tl.static_range(LOG):
        low, high = tl.split(tl.reshape(y, [ROWS, HALF, 2]))
        y = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
    return tl.reshape(y, [x.shape[0], BLOCK_D]) * (SIZE**-0.5)


@triton.jit
def _signs(signs, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    return tl.load(signs + dims, mask=dims < D, other=0.0)[None, :]


@triton.jit
def rotated(x, signs, D: tl.constexpr, BLOCK_D: tl.constexpr, LOG: tl.constexpr):
    """R x for rows of fp32 [rows, BLOCK_D], zero past D."""
    return hadamard(x * _signs(signs, D, BLOCK_D), BLOCK_D, LOG)


@triton.jit
def unrotated(x, signs, D: tl.constexpr, BLOCK_D: tl.constexpr, LOG: tl.constexpr):
    """R^T x: `rotated` undone."""
    return hadamard(x, BLOCK_D, LOG) * _signs(signs, D, BLOCK_D)
