"""Storing tokens as codes: ops/formats/codecs.py encodes the same numbers to the same bytes.

Divisions are exact (div_rn) and logarithms fp64, since a code is what is left of them after rounding.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.formats import affine, scales
from kvreclaim.ops.triton.codes import FP8, INT4, INT8
from kvreclaim.ops.triton.layout import BOUNDARIES as FIRST_BOUNDARY
from kvreclaim.ops.triton.rotation import rotated

LIMIT = tl.constexpr(affine.LIMIT)
SLACK = tl.constexpr(scales.SLACK)
LARGEST = tl.constexpr(2.0**64)
BOUNDARIES = tl.constexpr(FIRST_BOUNDARY)
SQUARABLE = tl.constexpr(1e17)
"""Far above the largest scale; a sum of its squares is finite."""
TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken away again, it rounds to the nearest integer, ties to even."""
INT8_BIAS = tl.constexpr(scales.INT8.bias)
FP8_BIAS = tl.constexpr(scales.FP8.bias)
TURBO_BIAS = tl.constexpr(scales.TURBO.bias)
INT4_BIAS = tl.constexpr(scales.INT4.bias)
INT4_STEPS = tl.constexpr(scales.INT4.steps)
INT4_LAST = tl.constexpr(scales.INT4.last)
KEY_STEPS = tl.constexpr(float(affine.STEPS))
KEY_REACH = tl.constexpr(affine.REACH)


@triton.jit
def _clamped(x, least, most):
    return tl.minimum(tl.maximum(x, least), most)


@triton.jit
def _rounded(x):
    """Round numbers below 2^22."""
    return (x + TO_INTEGER) - TO_INTEGER


@triton.jit
def _scale_code(scale, STEPS: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr):
    """ScaleCode.encode of scales >= 0."""
    wide = _clamped(scale.to(tl.float64), 2.0**-BIAS, LARGEST)
    code = tl.floor((tl.log2(wide) + BIAS) * STEPS + SLACK)
    return _clamped(code, 0.0, LAST).to(tl.int32)


@triton.jit
def _fp8_bits(x):
    """fp32 of at most 448 -> OCP E4M3, to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    wide = size.to(tl.int32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    return tl.where(size < 0.015625, subnormal, normal) | ((bits >> 24) & 128)


@triton.jit
def _packed(numbers, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of 0 ... 15 -> [rows, BLOCK_D / 2], the even dim in the low half."""
    low, high = tl.split(tl.reshape(numbers, [ROWS, BLOCK_D // 2, 2]))
    return low | high << 4


@triton.jit
def _turned(x, store, L: tl.constexpr, SIDE: tl.constexpr):
    """R x of a rotated format for x [rows, BLOCK], zero past D."""
    if SIDE:
        return rotated(x, store.v_signs, L.DV, L.BLOCK_DV, L.V_LOG)
    else:
        return rotated(x, store.k_signs, L.D, L.BLOCK_D, L.K_LOG)


@triton.jit
def _encode_vector(x, store, L: tl.constexpr, SIDE: tl.constexpr):
    """x [rows, BLOCK] zero past D. Returns: its codes, packed where they are of 4 bits, and its scale's."""
    FORMAT: tl.constexpr = L.V_FORMAT if SIDE else L.K_FORMAT
    table = store.v_table if SIDE else store.k_table
    D: tl.constexpr = L.DV if SIDE else L.D
    BLOCK_D: tl.constexpr = L.BLOCK_DV if SIDE else L.BLOCK_D
    if FORMAT == INT8:
        code = _scale_code(tl.div_rn(tl.max(tl.abs(x), axis=1), 127.0), 256, INT8_BIAS, 4095)
        steps = tl.div_rn(x, tl.load(table + code)[:, None])
        return _rounded(_clamped(steps, -127.0, 127.0)).to(tl.int32) + 128, code
    elif FORMAT == FP8:
        code = _scale_code(tl.div_rn(tl.max(tl.abs(x), axis=1), 448.0), 256, FP8_BIAS, 4095)
        steps = tl.div_rn(x, tl.load(table + code)[:, None])
        return _fp8_bits(_clamped(steps, -448.0, 448.0)), code
    else:
        small = _clamped(x, -SQUARABLE, SQUARABLE)
        norm = tl.sqrt_rn(tl.sum(small * small, axis=1))
        code = _scale_code(tl.div_rn(norm, D**0.5), 256, TURBO_BIAS, 4095)
        code = tl.where(norm == 0, 0, tl.maximum(code, 1))
        x = _turned(x, store, L, SIDE)
        step = tl.where(code == 0, 1.0, tl.load(table + code))
        x = tl.div_rn(x, step[:, None])
        numbers = tl.full(x.shape, 0, tl.int32)
        for i in tl.static_range(15):
            numbers += (x > tl.load(table + (BOUNDARIES + i))).to(tl.int32)
        return _packed(numbers, x.shape[0], BLOCK_D), code


@triton.jit
def _encode_groups(x, table, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """int4 of rotated x [rows, BLOCK_D], zero past D. Returns: packed codes; scales and centres [rows, G]."""
    GROUPS: tl.constexpr = (BLOCK_D + 31) // 32
    WIDTH: tl.constexpr = BLOCK_D // GROUPS
    dims = tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.reshape(x, [ROWS, GROUPS, WIDTH])
    least = tl.min(tl.where((dims < D)[None, :, :], x, LIMIT), axis=2)
    most = tl.max(tl.where((dims < D)[None, :, :], x, -LIMIT), axis=2)
    centre = (least + most) * 0.5
    ideal = tl.maximum(tl.div_rn(most - least, 15.0), tl.div_rn(tl.abs(centre), KEY_REACH))
    s = _scale_code(ideal, INT4_STEPS, INT4_BIAS, INT4_LAST)
    step = tl.load(table + s)
    half = tl.where(least == most, tl.where(least < 0, -0.5, 0.5), 0.0)
    z = _rounded(_clamped((tl.div_rn(centre, step) - half) * KEY_STEPS, -127.0, 127.0))
    first = tl.div_rn(z, KEY_STEPS) - 7.5
    n = tl.div_rn(x, step[:, :, None]) - first[:, :, None]
    nothing = (least == 0) & (most == 0)
    n = tl.where(nothing[:, :, None], 0.0, _rounded(_clamped(n, 0.0, 15.0)))
    codes = _packed(tl.reshape(n.to(tl.int32), [ROWS, BLOCK_D]), ROWS, BLOCK_D)
    return codes, tl.where(nothing, 0, s), tl.where(nothing, 0, z.to(tl.int32) + 128)


@triton.jit
def _store_side(x, store, row, is_row, ROWS: tl.constexpr, L: tl.constexpr, SIDE: tl.constexpr):
    """Codes of x [rows, BLOCK] and their parameters to their rows of the cache. Returns: the upper bits of
    the scales' codes [rows], for which both sides share a byte; int4 has none."""
    FORMAT: tl.constexpr = L.V_FORMAT if SIDE else L.K_FORMAT
    D: tl.constexpr = L.DV if SIDE else L.D
    BLOCK_D: tl.constexpr = L.BLOCK_DV if SIDE else L.BLOCK_D
    FIRST: tl.constexpr = L.V_PARAM if SIDE else 0
    BITS: tl.constexpr = 8 if FORMAT <= INT8 else 4
    if FORMAT == INT4:
        x = _clamped(_turned(x, store, L, SIDE), -LIMIT, LIMIT)
        codes, s, z = _encode_groups(x, store.v_table if SIDE else store.k_table, ROWS, D, BLOCK_D)
        group = tl.arange(0, (BLOCK_D + 31) // 32)
        places = store.params + row[:, None] * L.PARAMS + (FIRST + 2 * group)[None, :]
        mask = is_row[:, None] & (group < (D + 31) // 32)[None, :]
        tl.store(places, s.to(tl.uint8), mask=mask)
        tl.store(places + 1, z.to(tl.uint8), mask=mask)
        upper = tl.full([ROWS], 0, tl.int32)
    else:
        codes, scale = _encode_vector(x, store, L, SIDE)
        tl.store(store.params + row * L.PARAMS + FIRST, (scale & 255).to(tl.uint8), mask=is_row)
        upper = scale >> 8
    at = tl.arange(0, BLOCK_D * BITS // 8)
    mask = is_row[:, None] & (at < D * BITS // 8)[None, :]
    places = (store.v if SIDE else store.k) + row[:, None] * (D * BITS // 8) + at[None, :]
    tl.store(places, codes.to(tl.uint8), mask=mask)
    return upper


@triton.jit
def _load_vectors(vectors, tokens, heads, is_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] fp32, bounded as all codecs do it, zero past D."""
    dims = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (dims < D)[None, :]
    rows = tokens * vectors.stride_t + heads * vectors.stride_h
    places = vectors.x + rows[:, None] + dims[None, :]
    numbers = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    return _clamped(tl.where(numbers == numbers, numbers, 0.0), -LIMIT, LIMIT)


@triton.jit(do_not_specialize=["num_tokens"])
def encode_kernel(k, v, store, slot_mapping, num_tokens, L: tl.constexpr, ROWS: tl.constexpr):
    """Program p encodes ROWS keys and values of k and v (Rows [T, K, ...]), viewed as [T * K, ...]; one with
    a negative slot is not written."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens, heads = (index // L.KV_HEADS).to(tl.int64), index % L.KV_HEADS
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    is_row = slots >= 0
    row = (slots // L.S * L.KV_HEADS + heads) * L.S + slots % L.S
    x = _load_vectors(k, tokens, heads, is_row, L.D, L.BLOCK_D)
    keys = _store_side(x, store, row, is_row, ROWS, L, 0)
    x = _load_vectors(v, tokens, heads, is_row, L.DV, L.BLOCK_DV)
    values = _store_side(x, store, row, is_row, ROWS, L, 1)
    if L.K_FORMAT != INT4 or L.V_FORMAT != INT4:
        places = store.params + row * L.PARAMS + (L.PARAMS - 1)
        tl.store(places, (keys | values << 4).to(tl.uint8), mask=is_row)
