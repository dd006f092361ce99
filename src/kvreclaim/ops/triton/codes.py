"""Device functions: rows of any format as tiles of numbers.

The meaning of codes is documented in ops/formats: codecs.py and affine.py (groups of 4-bit codes).
Everything is integer arithmetic, table look-ups and fp32, in the order of the codecs, so that the numbers are
the codecs' bit for bit; no type of 8 bits is needed. SIDE 0 is the keys (their stored dims), 1 the values.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.layout import FORMAT_IDS
from kvreclaim.ops.triton.layout import LEVELS as FIRST_LEVEL
from kvreclaim.ops.triton.rotation import unrotated
from kvreclaim.ops.triton.slots import load_rows

PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(FORMAT_IDS["fp8_e4m3"])
INT8 = tl.constexpr(FORMAT_IDS["int8"])
INT4 = tl.constexpr(FORMAT_IDS["int4"])
TURBO4 = tl.constexpr(FORMAT_IDS["turboquant4"])
LEVELS = tl.constexpr(FIRST_LEVEL)


@triton.jit
def _integers(n):
    """int32 of 0 ... 2^23 - 1 as fp32, without the slow conversion."""
    return (n | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _fp8(code):
    """Bits of OCP E4M3 as fp32: the exponent moved by 120, subnormals included."""
    size = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(code >= 128, -size, size)


@triton.jit
def _bytes(x, rows, valid, SIZE: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr):
    """[rows, BLOCK] int32 of rows of SIZE bytes, FILL where not valid and past SIZE."""
    at = tl.arange(0, BLOCK)
    mask = valid[:, None] & (at < SIZE)[None, :]
    return tl.load(x + rows[:, None] * SIZE + at[None, :], mask=mask, other=FILL).to(tl.int32)


@triton.jit
def _joined(low, high, BLOCK_D: tl.constexpr):
    """Even and odd dims [rows, BLOCK_D / 2] -> [rows, BLOCK_D]."""
    return tl.reshape(tl.join(low, high), [low.shape[0], BLOCK_D])


@triton.jit
def _spread(x, BLOCK_D: tl.constexpr):
    """A number per group [rows, G] -> per dim [rows, BLOCK_D]."""
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], BLOCK_D // x.shape[1]])
    return tl.reshape(wide, [x.shape[0], BLOCK_D])


@triton.jit
def load_scales(store, rows, valid, L: tl.constexpr, SIDE: tl.constexpr):
    """[rows] fp32: the scales of a side that has one for all dims; 0 where not valid."""
    places = store.params + rows * L.PARAMS
    low = tl.load(places + (L.V_PARAM if SIDE else 0), mask=valid, other=0).to(tl.int32)
    high = tl.load(places + (L.PARAMS - 1), mask=valid, other=0).to(tl.int32)
    code = low | ((high >> (4 * SIDE)) & 15) << 8
    return tl.load((store.v_table if SIDE else store.k_table) + code, mask=valid, other=0.0)


@triton.jit
def load_numbers(store, rows, valid, L: tl.constexpr, SIDE: tl.constexpr):
    """[rows, BLOCK] fp32 of those formats before they are scaled. Finite, and zero past D, except that
    turboquant4 has a level there."""
    FORMAT: tl.constexpr = L.V_FORMAT if SIDE else L.K_FORMAT
    D: tl.constexpr = L.DV if SIDE else L.D
    BLOCK_D: tl.constexpr = L.BLOCK_DV if SIDE else L.BLOCK_D
    codes = store.v if SIDE else store.k
    if FORMAT == INT8:
        return (_bytes(codes, rows, valid, D, BLOCK_D, 128) | 0x4B000000).to(
            tl.float32, bitcast=True
        ) - 8388736.0
    elif FORMAT == FP8:
        return _fp8(_bytes(codes, rows, valid, D, BLOCK_D, 0))
    else:
        pairs = _bytes(codes, rows, valid, D // 2, BLOCK_D // 2, 0)
        levels = (store.v_table if SIDE else store.k_table) + LEVELS
        low = tl.load(levels + (pairs & 15))
        high = tl.load(levels + (pairs >> 4))
        return _joined(low, high, BLOCK_D)


@triton.jit
def _grid(pairs, step, first, BLOCK_D: tl.constexpr):
    """step * (n + first) of 4-bit codes [rows, BLOCK_D / 2]; step and first [rows, BLOCK_D]."""
    return step * (_joined(_integers(pairs & 15), _integers(pairs >> 4), BLOCK_D) + first)


@triton.jit
def _step(table, s, z):
    """The scale of a group of int4; z = 0 marks a group of zeros."""
    return tl.where(z == 0, 0.0, tl.load(table + s))


@triton.jit
def _first(z):
    """The value of code 0 of such a group, in steps: its centre in thirds, less half the codes."""
    return tl.div_rn(_integers(z) - 128.0, 3.0) - 7.5


@triton.jit
def _load_int4(store, rows, valid, L: tl.constexpr, SIDE: tl.constexpr):
    D: tl.constexpr = L.DV if SIDE else L.D
    BLOCK_D: tl.constexpr = L.BLOCK_DV if SIDE else L.BLOCK_D
    FIRST: tl.constexpr = L.V_PARAM if SIDE else 0
    GROUPS: tl.constexpr = (BLOCK_D + 31) // 32
    group = tl.arange(0, GROUPS)
    mask = valid[:, None] & (group < (D + 31) // 32)[None, :]
    places = store.params + rows[:, None] * L.PARAMS + (FIRST + 2 * group)[None, :]
    if L.PARAMS % 2 == 0 and FIRST % 2 == 0:  # one load for both bytes of a group
        both = tl.load(places.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.int32)
        s, z = both & 255, both >> 8
    else:
        s = tl.load(places, mask=mask, other=0).to(tl.int32)
        z = tl.load(places + 1, mask=mask, other=0).to(tl.int32)
    pairs = _bytes(store.v if SIDE else store.k, rows, valid, D // 2, BLOCK_D // 2, 0)
    step = _spread(_step(store.v_table if SIDE else store.k_table, s, z), BLOCK_D)
    return _grid(pairs, step, _spread(_first(z), BLOCK_D), BLOCK_D)


@triton.jit
def load_tile(store, rows, valid, L: tl.constexpr, SIDE: tl.constexpr, AS_STORED: tl.constexpr):
    """Rows of one side: [rows, BLOCK], zero where not valid and past D. fp32, but a plain format's own type
    if AS_STORED; those of a rotated format are rotated."""
    D: tl.constexpr = L.DV if SIDE else L.D
    BLOCK_D: tl.constexpr = L.BLOCK_DV if SIDE else L.BLOCK_D
    FORMAT: tl.constexpr = L.V_FORMAT if SIDE else L.K_FORMAT
    if FORMAT == PLAIN:
        tile = load_rows(store.v if SIDE else store.k, rows, valid, D, BLOCK_D, AS_STORED)
    else:
        if FORMAT == INT4:
            tile = _load_int4(store, rows, valid, L, SIDE)
        else:
            scale = load_scales(store, rows, valid, L, SIDE)
            tile = load_numbers(store, rows, valid, L, SIDE) * scale[:, None]
        if D != BLOCK_D:
            tile = tl.where((tl.arange(0, BLOCK_D) < D)[None, :], tile, 0.0)
    return tile


@triton.jit
def load_real(store, rows, valid, L: tl.constexpr, SIDE: tl.constexpr):
    """load_tile in fp32, as the model gave it: a rotation is undone."""
    tile = load_tile(store, rows, valid, L, SIDE, False)
    if SIDE:
        if L.V_LOG:
            tile = unrotated(tile, store.v_signs, L.DV, L.BLOCK_DV, L.V_LOG)
    elif L.K_LOG:
        tile = unrotated(tile, store.k_signs, L.D, L.BLOCK_D, L.K_LOG)
    return tile
