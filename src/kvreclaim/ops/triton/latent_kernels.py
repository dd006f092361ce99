"""Multi-head latent attention between its products: norms, rotation, stores, absorption of keys' weights.

Computed in fp32 and rounded once, when stored.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.decoder_kernels import normed


@triton.jit
def _turned(start, angles, dims, mask, cos, sin, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """The rotated halves of rows of 2 HALF numbers at `start`; angles: where a row's begin in cos and sin."""
    places = start + dims * (2 if NEIGHBOURS else 1)
    low = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(places + (1 if NEIGHBOURS else HALF), mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + angles + dims, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angles + dims, mask=mask, other=0.0).to(tl.float32)
    return low * c - high * s, high * c + low * s


@triton.jit
def latent_kernel(
    x,
    q_norm,
    kv_norm,
    cos,
    sin,
    q,
    latents,
    cache_k,
    cache_v,
    slots,
    q_eps,
    kv_eps,
    Q: tl.constexpr,
    R: tl.constexpr,
    ROTARY: tl.constexpr,
    ANGLES: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    Q_FROM_ONE: tl.constexpr,
    KV_FROM_ONE: tl.constexpr,
    IS_STORED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Program (t, 0): latents [T, R + ROTARY] of rows of x [T, Q + R + ROTARY], the first R numbers normed,
    the rest rotated. IS_STORED: also into the slot of the token in cache_v and cache_k; a negative slot is
    written nowhere. Program (t, 1): q [T, Q], normed. cos, sin: rows lie ANGLES apart."""
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    row = x + token * (Q + R + ROTARY)
    if tl.program_id(1) == 0:
        dims, halves = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_HALF)
        mask, is_half = dims < R, halves < HALF
        value = tl.load(row + Q + dims, mask=mask, other=0.0).to(tl.float32)
        value = normed(value, kv_norm, kv_eps, R, KV_FROM_ONE, BLOCK_R).to(latents.dtype.element_ty)
        low, high = _turned(row + Q + R, token * ANGLES, halves, is_half, cos, sin, HALF, NEIGHBOURS)
        low, high = low.to(latents.dtype.element_ty), high.to(latents.dtype.element_ty)
        start = latents + token * (R + ROTARY)
        tl.store(start + dims, value, mask=mask)
        tl.store(start + R + halves, low, mask=is_half)
        tl.store(start + R + HALF + halves, high, mask=is_half)
        if IS_STORED:
            slot = tl.load(slots + token)
            if slot >= 0:
                tl.store(cache_v + slot * R + dims, value, mask=mask)
                tl.store(cache_k + slot * ROTARY + halves, low, mask=is_half)
                tl.store(cache_k + slot * ROTARY + HALF + halves, high, mask=is_half)
    else:
        columns = tl.arange(0, BLOCK_Q)[None, :]
        is_column = columns < Q
        first = tl.load(row + columns, mask=is_column, other=0.0).to(tl.float32)
        tl.store(
            q + token * Q + columns, normed(first, q_norm, q_eps, Q, Q_FROM_ONE, BLOCK_Q), mask=is_column
        )


@triton.jit(do_not_specialize=["T"])
def absorb_kernel(
    q,
    weight,
    cos,
    sin,
    out,
    T,
    STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROTARY: tl.constexpr,
    WIDTH: tl.constexpr,
    ANGLES: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    IS_ABSORBED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """out [T, HEADS, WIDTH + ROTARY] of q [T, HEADS, NOPE + ROTARY]: the last ROTARY numbers rotated, the
    first NOPE as they are, or IS_ABSORBED times their head's weight [NOPE, WIDTH]. Tokens of q lie STRIDE
    apart, heads of weight WEIGHT_STRIDE. Program (h, n, t): columns n of head h of tokens t."""
    HALF: tl.constexpr = ROTARY // 2
    head = tl.program_id(0)
    tokens = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_token = tokens < T
    start = q + tokens * STRIDE + head * (NOPE + ROTARY)
    target = out + (tokens * HEADS + head) * (WIDTH + ROTARY)
    mask = is_token & (n < WIDTH)
    if IS_ABSORBED:
        columns = weight + head.to(tl.int64) * WEIGHT_STRIDE + n
        total = tl.full([BLOCK_T, BLOCK_N], 0, tl.float32)
        for first in range(0, NOPE, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            is_row = k < NOPE
            rows = tl.load(start + k[None, :], mask=is_token & is_row[None, :], other=0.0)
            w = tl.load(columns + k[:, None] * WIDTH, mask=is_row[:, None] & (n < WIDTH), other=0.0)
            total += tl.dot(rows.to(DTYPE), w.to(DTYPE), input_precision=PRECISION)
        tl.store(target + n, total, mask=mask)
    else:
        tl.store(target + n, tl.load(start + n, mask=mask, other=0.0), mask=mask)
    if tl.program_id(1) == 0:
        halves = tl.arange(0, BLOCK_HALF)[None, :]
        is_half = is_token & (halves < HALF)
        low, high = _turned(start + NOPE, tokens * ANGLES, halves, is_half, cos, sin, HALF, NEIGHBOURS)
        tl.store(target + WIDTH + halves, low, mask=is_half)
        tl.store(target + WIDTH + HALF + halves, high, mask=is_half)
