"""Device functions of attention: a tile of queries over a run of slots, online softmax in base 2.

Slots that are not attended are never loaded (their lanes read 0), so that whatever lies past a
sequence's end has no effect.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.slots import load_rows, slot_rows

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def attended(
    slots,
    valid,
    query_slots,
    shift,
    masks,
    layer,
    head,
    window,
    HAS_WINDOW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_EVICTED: tl.constexpr,
):
    """[rows, slots] bool. masks: this sequence's row of Masks.table (address, length, strides; twice)."""
    seen = valid[None, :] & (slots[None, :] <= query_slots[:, None])
    if HAS_WINDOW:
        positions = slots + shift
        if HAS_POSITIONS:
            known = valid & (slots < tl.load(masks + 5))
            first = layer * tl.load(masks + 6) + head * tl.load(masks + 7)
            address = tl.load(masks + 4).to(tl.pointer_type(tl.int32)) + first
            positions = tl.where(known, tl.load(address + slots, mask=known, other=0), positions)
        seen = seen & ((query_slots + shift)[:, None] - positions[None, :] < window)
    if HAS_EVICTED:
        known = valid & (slots < tl.load(masks + 1))
        first = layer * tl.load(masks + 2) + head * tl.load(masks + 3)
        address = tl.load(masks).to(tl.pointer_type(tl.int8)) + first
        seen = seen & (tl.load(address + slots, mask=known, other=0) == 0)[None, :]
    return seen


@triton.jit
def scores_of(q, k, scale, cap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores in base 2. The host puts log2(e) into scale and cap: scale * q.k, or cap * tanh(s) where
    scale * q.k is s in base 2."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_SOFTCAP:
        shrunk = tl.exp2(tl.abs(scores) * -2.0)
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        scores = cap * tl.where(scores < 0, -tanh, tanh)
    return scores


@triton.jit
def attend_slots(
    query,
    query_slots,
    start,
    stop,
    k_cache,
    v_cache,
    table,
    shift,
    masks,
    scale,
    cap,
    window,
    layer,
    head,
    KV_HEADS: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_EVICTED: tl.constexpr,
    KEEP_16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of queries over the slots [start, stop): maximum and sum [rows] and values [rows, BLOCK_DV]."""
    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for tile in range(start, stop, BLOCK_N):
        slots = tile + tl.arange(0, BLOCK_N)
        valid = slots < stop
        rows = slot_rows(table, slots, valid, head, KV_HEADS, S)
        k = load_rows(k_cache, rows, valid, D, BLOCK_D, KEEP_16)
        scores = scores_of(query, k, scale, cap, HAS_SOFTCAP, PRECISION)
        seen = attended(
            slots,
            valid,
            query_slots,
            shift,
            masks,
            layer,
            head,
            window,
            HAS_WINDOW,
            HAS_POSITIONS,
            HAS_EVICTED,
        )
        scores = tl.where(seen, scores, NOTHING)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == NOTHING, 0.0, higher)
        probs = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        v = load_rows(v_cache, rows, valid, DV, BLOCK_DV, KEEP_16)
        total = total * fade + tl.sum(probs, axis=1)
        acc = acc * fade[:, None] + tl.dot(probs.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    return top, total, acc


@triton.jit
def normalised(top, total, acc, sinks, heads, is_row, HAS_SINKS: tl.constexpr):
    """acc over the softmax's denominator, the sinks' share included; zero where nothing was seen."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, sink)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.exp2(sink - higher)
        acc = acc * fade[:, None]
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]
