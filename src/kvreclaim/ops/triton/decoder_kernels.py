"""Kernels between the products of a decoder layer: RMS norms, rotary embedding, gates.

Computed in fp32 and rounded once, when stored. Tiles are ROWS by BLOCK numbers.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normed(value, weight, eps, M: tl.constexpr, FROM_ONE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of M numbers over their root mean square, times the weight [M], FROM_ONE times 1 + weight."""
    dims = tl.arange(0, BLOCK)
    factor = tl.rsqrt(tl.sum(value * value, axis=1) / M + eps)
    scale = tl.load(weight + dims, mask=dims < M, other=0.0).to(tl.float32)
    if FROM_ONE:
        scale += 1.0
    return value * factor[:, None] * scale[None, :]


@triton.jit(do_not_specialize=["T"])
def rms_norm_kernel(
    x,
    residual,
    after,
    weight,
    out,
    total,
    wide,
    T,
    eps,
    M: tl.constexpr,
    STRIDE: tl.constexpr,
    FROM_ONE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [T, M]: RMS norm of rows of x, with the weight [M]. Rows of x and out lie STRIDE apart.
    HAS_RESIDUAL: of rows of x + residual, which become total; HAS_AFTER: x is normed first, with weight
    `after`. Without HAS_NORM there is no out. HAS_WIDE: wide [T, M] fp32 is a copy of out."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (dims < M)[None, :]
    places, spaced = rows[:, None] * M + dims[None, :], rows[:, None] * STRIDE + dims[None, :]
    value = tl.load(x + spaced, mask=mask, other=0.0).to(tl.float32)
    if HAS_AFTER:
        value = normed(value, after, eps, M, FROM_ONE, BLOCK)
    if HAS_RESIDUAL:
        value += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + places, value, mask=mask)
        value = value.to(tl.float32)
    if HAS_NORM:
        value = normed(value, weight, eps, M, FROM_ONE, BLOCK).to(out.dtype.element_ty)
        tl.store(out + spaced, value, mask=mask)
        if HAS_WIDE:
            tl.store(wide + places, value.to(tl.float32), mask=mask)


@triton.jit
def _head_weights(q_norm, k_norm, is_query, dims, mask, FROM_ONE: tl.constexpr):
    """[rows, dims] fp32: what the norm of each row's head multiplies by."""
    q = tl.load(q_norm + dims, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_norm + dims, mask=mask, other=0.0).to(tl.float32)
    weights = tl.where(is_query[:, None], q[None, :], k[None, :])
    return weights + 1.0 if FROM_ONE else weights


@triton.jit(do_not_specialize=["T"])
def rotate_kernel(
    x,
    cos,
    sin,
    q_norm,
    k_norm,
    T,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HALF_ANGLES: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    FROM_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Program p turns ROWS of the T * (HEADS + KV_HEADS) queries and keys of x [T, (H + 2 K) D] in place.
    NEIGHBOURS: dim 2 i with 2 i + 1, else i with i + R / 2. BLOCK holds R / 2 dims, BLOCK_REST the D - R that
    stay. HALF_ANGLES: cos and sin are [T, R / 2], not [T, R] with each angle twice."""
    TURNED: tl.constexpr = HEADS + KV_HEADS
    HALF: tl.constexpr = R // 2
    STEP: tl.constexpr = 2 if NEIGHBOURS else 1
    GAP: tl.constexpr = 1 if NEIGHBOURS else HALF
    ANGLES: tl.constexpr = HALF if HALF_ANGLES else R
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (index // TURNED).to(tl.int64), index % TURNED
    is_row = index < T * TURNED
    dims = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (dims < HALF)[None, :]
    start = x + (token * (TURNED + KV_HEADS) + head)[:, None] * D
    places = start + dims[None, :] * STEP
    low = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(places + GAP, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(low * low + high * high, axis=1)
        rest = tl.arange(0, BLOCK_REST)
        is_rest = is_row[:, None] & (rest < D - R)[None, :]
        if R < D:
            tail = tl.load(start + R + rest[None, :], mask=is_rest, other=0.0).to(tl.float32)
            squares += tl.sum(tail * tail, axis=1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        is_query = head < HEADS
        at, is_in = dims * STEP, dims < HALF
        low *= factor * _head_weights(q_norm, k_norm, is_query, at, is_in, FROM_ONE)
        high *= factor * _head_weights(q_norm + GAP, k_norm + GAP, is_query, at, is_in, FROM_ONE)
        if R < D:
            tail *= factor * _head_weights(q_norm + R, k_norm + R, is_query, rest, rest < D - R, FROM_ONE)
            tl.store(start + R + rest[None, :], tail, mask=is_rest)
    angles = token[:, None] * ANGLES + dims[None, :]
    c = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, low * c - high * s, mask=mask)
    c = tl.load(cos + ANGLES - HALF + angles, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + ANGLES - HALF + angles, mask=mask, other=0.0).to(tl.float32)
    tl.store(places + GAP, high * c + low * s, mask=mask)


@triton.jit
def activated(gate, GELU: tl.constexpr, ALPHA: tl.constexpr = 1.0):
    """gate sigmoid(ALPHA gate), or GELU by its tanh formula: (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    power = ALPHA * gate
    if GELU:
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(tl.minimum(-power, 88.0)))


@triton.jit(do_not_specialize=["T"])
def gate_kernel(x, out, T, WIDTH: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, WIDTH]: SiLU, or GELU by its tanh formula, of the first half of each row of x [T, 2 WIDTH]
    times the second."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (dims < WIDTH)[None, :]
    places = x + rows[:, None] * (2 * WIDTH) + dims[None, :]
    gate = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(places + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows[:, None] * WIDTH + dims[None, :], activated(gate, GELU) * up, mask=mask)
