"""Weights of 2 to 8 bits as numbers, and products with them; the layout is
csrc/include/kvreclaim/packed_codes.h."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

NIBBLE = tl.constexpr(0)
TABLE = tl.constexpr(1)
SIX = tl.constexpr(2)
BYTE = tl.constexpr(3)
TWO = tl.constexpr(4)
THREE = tl.constexpr(5)
FIVE = tl.constexpr(6)
SCALE = tl.constexpr(0)
ZERO = tl.constexpr(1)
MIN = tl.constexpr(2)
SUPER = tl.constexpr(3)
SIGNED = tl.constexpr(4)


@triton.jit
def _field(lines, word, mask, BITS: tl.constexpr):
    """The field of BITS bits of a word, where `lines` is its byte in the first of the lines; int32."""
    line = tl.load(lines + word * BITS // 8 * 64, mask=mask, other=0).to(tl.int32)
    return (line >> (word * BITS % 8)) & ((1 << BITS) - 1)


@triton.jit
def _codes(data, n, k, mask, K, CODES: tl.constexpr):
    """The codes at rows n and columns k, int32; of BYTE signed. n and k broadcast against each other."""
    chunk, word = (n // 16) * (K // 32) + k // 32, k % 32 // 4
    at = data + n % 16 * 4 + k % 4
    if CODES == BYTE:
        codes = tl.load(at + chunk * 512 + word * 64, mask=mask, other=0)
        return codes.to(tl.int8, bitcast=True).to(tl.int32)
    if CODES == SIX:
        half = at + chunk * 384 + word // 4 * 192
        return _field(half, word % 4, mask, 4) | (_field(half + 128, word % 4, mask, 2) << 4)
    if CODES == TWO:
        return _field(at + chunk * 128, word, mask, 2)
    if CODES == THREE:
        lines = at + chunk * 192
        return _field(lines, word, mask, 2) | (_field(lines + 128, word, mask, 1) << 2)
    if CODES == FIVE:
        lines = at + chunk * 320
        return _field(lines, word, mask, 4) | (_field(lines + 256, word, mask, 1) << 4)
    return _field(at + chunk * 256, word, mask, 4)


@triton.jit
def _numbers(
    data, scales, offsets, supers, table, n, k, mask, K, GROUP, CODES: tl.constexpr, GRID: tl.constexpr
):
    """The weights at rows n and columns k, fp32; 0 where masked."""
    codes = _codes(data, n, k, mask, K, CODES)
    block, row = n // 16, n % 16
    big = block * (K // 256) + k // 256
    if GRID == SIGNED:
        at = (block * (K // GROUP) + k // GROUP) * 16 + row
        a = tl.load(scales + at, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        d = tl.load(supers + big * 16 + row, mask=mask, other=0.0).to(tl.float32)
        return (codes - (32 if CODES == SIX else 4)).to(tl.float32) * (d * a)
    if GRID == SUPER:
        at = (block * (K // GROUP) + k // GROUP) * 32 + row
        a = tl.load(scales + at, mask=mask, other=0).to(tl.float32)
        b = tl.load(scales + at + 16, mask=mask, other=0).to(tl.float32)
        d = tl.load(supers + big * 32 + row, mask=mask, other=0.0).to(tl.float32)
        e = tl.load(supers + big * 32 + 16 + row, mask=mask, other=0.0).to(tl.float32)
        return codes.to(tl.float32) * (d * a) - e * b
    at = (block * (K // GROUP) + k // GROUP) * 16 + row
    scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    if CODES == TABLE:
        return tl.load(table + codes, mask=mask, other=0.0) * scale
    if GRID == ZERO:
        zeros = tl.load(offsets + at, mask=mask, other=0).to(tl.int32)
        return (codes - zeros).to(tl.float32) * scale
    if GRID == MIN:
        return codes.to(tl.float32) * scale + tl.load(offsets + at, mask=mask, other=0.0).to(tl.float32)
    if CODES == NIBBLE:
        codes = codes - 8
    if CODES == FIVE:
        codes = codes - 16
    return codes.to(tl.float32) * scale


@triton.jit(do_not_specialize=["M"])
def packed_product_kernel(
    x,
    data,
    scales,
    offsets,
    supers,
    table,
    y,
    M,
    N,
    K,
    GROUP,
    STEP,
    CODES: tl.constexpr,
    GRID: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [parts, M, N] fp32: of each part the products over its STEP columns; weights are rounded to DTYPE."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    first, end = part * STEP, tl.minimum(part * STEP + STEP, K)
    total = tl.full([BLOCK_M, BLOCK_N], 0, tl.float32)
    for start in range(first, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = (n < N)[None, :] & (k < end)[:, None]
        w = _numbers(
            data, scales, offsets, supers, table, n[None, :], k[:, None], mask, K, GROUP, CODES, GRID
        )
        here = (m < M)[:, None] & (k < end)[None, :]
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=here, other=0.0)
        total += tl.dot(rows.to(DTYPE), w.to(DTYPE), input_precision=PRECISION)
    places = (part * M + m)[:, None] * N + n[None, :]
    tl.store(y + places, total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["parts", "M"])
def sum_kernel(
    sums,
    bias,
    residual,
    y,
    parts,
    M,
    N,
    STRIDE,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [M, N]: sums [parts, M, N] added up, with bias [N] and residual [M, N]. Rows of y and of the residual
    lie STRIDE apart."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    total = tl.full([BLOCK], 0, tl.float32)
    for part in range(parts):
        total += tl.load(sums + (part * M + row) * N + n, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * STRIDE + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * STRIDE + n, total, mask=mask)


@triton.jit
def unpack_kernel(
    data,
    scales,
    offsets,
    supers,
    table,
    ids,
    y,
    K,
    GROUP,
    CODES: tl.constexpr,
    GRID: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [n, K]: rows ids [n] as numbers."""
    place = tl.program_id(0).to(tl.int64)
    n = tl.load(ids + place)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = k < K
    w = _numbers(data, scales, offsets, supers, table, n, k, mask, K, GROUP, CODES, GRID)
    tl.store(y + place * K + k, w, mask=mask)
