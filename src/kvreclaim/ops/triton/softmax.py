"""Device functions of attention: a tile of queries over a run of slots, online softmax in base 2.

Slots that are not attended are never loaded (their lanes read 0), so that bytes past a
sequence's end have no effect.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.codes import FP8, INT8, TURBO4, load_numbers, load_scales, load_tile
from kvreclaim.ops.triton.rotation import rotated, unrotated
from kvreclaim.ops.triton.slots import slot_rows

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def attended(slots, valid, query_slots, shift, known_positions, head, layer, rule, A: tl.constexpr):
    """[rows, slots] bool. known_positions: this sequence's row of SlotPositions.table."""
    seen = valid[None, :] & (slots[None, :] <= query_slots[:, None])
    if A.HAS_WINDOW:
        positions = slots + shift
        if A.HAS_POSITIONS:
            known = valid & (slots < tl.load(known_positions + 1))
            first = layer * tl.load(known_positions + 2) + head * tl.load(known_positions + 3)
            address = tl.load(known_positions).to(tl.pointer_type(tl.int32)) + first
            positions = tl.where(known, tl.load(address + slots, mask=known, other=0), positions)
        seen = seen & ((query_slots + shift)[:, None] - positions[None, :] < rule.window)
    return seen


@triton.jit
def dots(q, k, A: tl.constexpr):
    """[queries, keys] fp32."""
    return tl.dot(q, tl.trans(k), input_precision=A.PRECISION)


@triton.jit
def softened(scores, rule, A: tl.constexpr):
    """Scores in base 2 of q.k. The host puts log2(e) into scale and cap: scale * q.k, or cap * tanh(s) where
    scale * q.k is s in base 2."""
    scores = scores * rule.scale
    if A.HAS_SOFTCAP:
        shrunk = tl.exp2(tl.abs(scores) * -2.0)
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        scores = rule.cap * tl.where(scores < 0, -tanh, tanh)
    return scores


@triton.jit
def _query_side(queries, tokens, heads, is_row, FIRST, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    rows = tokens * queries.stride_t + heads * queries.stride_h
    places = queries.x + rows[:, None] + (FIRST + dims)[None, :]
    return tl.load(places, mask=is_row[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def load_queries(queries, tokens, heads, is_row, store, L: tl.constexpr, A: tl.constexpr):
    """Rows of q as attend_slots takes them: against the stored dims of keys [rows, BLOCK_D], and of a latent
    cache against its values [rows, BLOCK_DV]; else the same once more."""
    FIRST: tl.constexpr = L.DV if L.LATENT else 0
    query = _query_side(queries, tokens, heads, is_row, FIRST, L.D, L.BLOCK_D)
    if not A.KEEP_16:
        query = query.to(tl.float32)
    if L.K_LOG:
        query = rotated(query.to(tl.float32), store.k_signs, L.D, L.BLOCK_D, L.K_LOG).to(query.dtype)
    latent = query
    if L.LATENT:
        latent = _query_side(queries, tokens, heads, is_row, 0, L.DV, L.BLOCK_DV)
        if not A.KEEP_16:
            latent = latent.to(tl.float32)
        if L.V_LOG:
            latent = rotated(latent.to(tl.float32), store.v_signs, L.DV, L.BLOCK_DV, L.V_LOG).to(latent.dtype)
    return query, latent


@triton.jit
def _tile_scores(query, store, rows, valid, L: tl.constexpr, A: tl.constexpr):
    """q.k over the stored dims of keys. Scales that a whole key shares are applied to the products: 16-bit
    queries then meet int8's and fp8's numbers exactly."""
    if L.K_FORMAT == INT8 or L.K_FORMAT == FP8 or L.K_FORMAT == TURBO4:
        products = dots(query, load_numbers(store, rows, valid, L, 0).to(query.dtype), A)
        return products * load_scales(store, rows, valid, L, 0)[None, :]
    else:
        return dots(query, load_tile(store, rows, valid, L, 0, A.KEEP_16).to(query.dtype), A)


@triton.jit
def attend_slots(
    query,
    latent,
    query_slots,
    start,
    stop,
    store,
    seqs,
    seq,
    head,
    rule,
    table_stride,
    layer,
    L: tl.constexpr,
    A: tl.constexpr,
):
    """Rows of queries (load_queries) over the slots [start, stop) of a sequence, start a multiple of BLOCK_N:
    maximum and sum [rows] and values [rows, BLOCK_DV]; of a rotated format, rotated ones."""
    table = seqs.block_table + seq.to(tl.int64) * table_stride
    shift = tl.load(seqs.shifts + seq)
    known_positions = seqs.positions + seq * 4
    top = tl.full([A.BLOCK_M], NOTHING, tl.float32)
    total = tl.full([A.BLOCK_M], 0, tl.float32)
    acc = tl.full([A.BLOCK_M, L.BLOCK_DV], 0, tl.float32)
    for tile in range(start, stop, A.BLOCK_N):
        slots = tile + tl.arange(0, A.BLOCK_N)
        valid = slots < stop
        rows = slot_rows(table, slots, valid, head, L.KV_HEADS, L.S)
        scores = _tile_scores(query, store, rows, valid, L, A)
        if L.LATENT:
            v = load_tile(store, rows, valid, L, 1, A.KEEP_16).to(query.dtype)
            scores += dots(latent, v, A)
        scores = softened(scores, rule, A)
        seen = attended(slots, valid, query_slots, shift, known_positions, head, layer, rule, A)
        scores = tl.where(seen, scores, NOTHING)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == NOTHING, 0.0, higher)
        probs = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        if not L.LATENT:
            v = load_tile(store, rows, valid, L, 1, A.KEEP_16).to(query.dtype)
        total = total * fade + tl.sum(probs, axis=1)
        acc = acc * fade[:, None] + tl.dot(probs.to(v.dtype), v, input_precision=A.PRECISION)
        top = higher
    return top, total, acc


@triton.jit
def normalised(top, total, acc, sinks, heads, is_row, A: tl.constexpr):
    """acc over the softmax's denominator, the sinks' share included; zero where nothing was seen. heads: of
    all sequences one after the other."""
    if A.NUM_SINKS:
        sink = tl.load(sinks + heads % A.NUM_SINKS, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, sink)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.exp2(sink - higher)
        acc = acc * fade[:, None]
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def real_values(values, store, L: tl.constexpr):
    """Sums of values [rows, BLOCK_DV] as the model gave them: a rotation is undone."""
    if L.V_LOG:
        values = unrotated(values, store.v_signs, L.DV, L.BLOCK_DV, L.V_LOG)
    return values
