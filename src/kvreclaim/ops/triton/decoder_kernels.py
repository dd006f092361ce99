"""What lies between the products of a decoder layer: RMS norm, rotary embedding, SiLU(gate) * up.

Computed in fp32 and rounded once, when stored. Tiles are ROWS by BLOCK numbers.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    T,
    eps,
    M: tl.constexpr,
    FROM_ONE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [T, M]: rows of x, each over its root mean square, times the weight [M], FROM_ONE times 1 + weight.
    HAS_RESIDUAL: rows of x + residual, which become total."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (dims < M)[None, :]
    places = rows[:, None] * M + dims[None, :]
    value = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + places, value, mask=mask)
        value = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=1) / M + eps)
    scale = tl.load(weight + dims, mask=dims < M, other=0.0).to(tl.float32)
    if FROM_ONE:
        scale += 1.0
    tl.store(out + places, value * factor[:, None] * scale[None, :], mask=mask)


@triton.jit
def _head_weights(q_norm, k_norm, is_query, dims, mask):
    """[rows, dims] fp32: the weights of the norm of each row's head."""
    q = tl.load(q_norm + dims, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_norm + dims, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q[None, :], k[None, :])


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
    HAS_NORMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Program p turns ROWS of the T * (HEADS + KV_HEADS) queries and keys of x [T, (H + 2 K) D] in place.
    BLOCK holds R / 2 dims, BLOCK_REST the D - R that stay."""
    TURNED: tl.constexpr = HEADS + KV_HEADS
    HALF: tl.constexpr = R // 2
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (index // TURNED).to(tl.int64), index % TURNED
    is_row = index < T * TURNED
    dims = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (dims < HALF)[None, :]
    start = x + (token * (TURNED + KV_HEADS) + head)[:, None] * D
    places = start + dims[None, :]
    low = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(low * low + high * high, axis=1)
        rest = tl.arange(0, BLOCK_REST)
        is_rest = is_row[:, None] & (rest < D - R)[None, :]
        if R < D:
            tail = tl.load(start + R + rest[None, :], mask=is_rest, other=0.0).to(tl.float32)
            squares += tl.sum(tail * tail, axis=1)
        factor = tl.rsqrt(squares / D + eps)[:, None]
        is_query = head < HEADS
        low *= factor * _head_weights(q_norm, k_norm, is_query, dims, dims < HALF)
        high *= factor * _head_weights(q_norm + HALF, k_norm + HALF, is_query, dims, dims < HALF)
        if R < D:
            tail *= factor * _head_weights(q_norm + R, k_norm + R, is_query, rest, rest < D - R)
            tl.store(start + R + rest[None, :], tail, mask=is_rest)
    angles = token[:, None] * R + dims[None, :]
    c = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, low * c - high * s, mask=mask)
    c = tl.load(cos + HALF + angles, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + HALF + angles, mask=mask, other=0.0).to(tl.float32)
    tl.store(places + HALF, high * c + low * s, mask=mask)


@triton.jit(do_not_specialize=["T"])
def gate_kernel(x, out, T, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, WIDTH]: SiLU of the first half of each row of x [T, 2 WIDTH] times the second."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (dims < WIDTH)[None, :]
    places = x + rows[:, None] * (2 * WIDTH) + dims[None, :]
    gate = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(places + WIDTH, mask=mask, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(tl.minimum(-gate, 88.0)))
    tl.store(out + rows[:, None] * WIDTH + dims[None, :], silu * up, mask=mask)
