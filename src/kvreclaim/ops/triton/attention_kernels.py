"""Attention over a paged cache as Triton kernels: split-KV decode, its reduction, and query tiles.

q and out [T, H, D]; block_table [N, W] int32. The G query heads of a KV head share each key: row m of
a tile is query m // G (always 0 when decoding), head m % G.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.softmax import LOG2_E, NOTHING, attend_slots, normalised


@triton.jit
def decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    part_max,
    part_sum,
    part_acc,
    seq_ids,
    query_starts,
    block_table,
    seq_lens,
    shifts,
    masks,
    sinks,
    scale,
    cap,
    window,
    layer,
    q_stride_t,
    q_stride_h,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_EVICTED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KEEP_16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (i, head, split): the one query of sequence seq_ids[i] over a share of its tiles.

    Grid [n, K, SPLITS]. Every sequence is cut into SPLITS runs of whole tiles by its own length, so
    that the grid depends on no length. With SPLITS = 1 writes out; else part_max and part_sum
    [n, H, SPLITS] of all splits and part_acc [n, H, SPLITS, Dv] of those that saw something.
    """
    index = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    seq = tl.load(seq_ids + index)
    token = tl.load(query_starts + seq).to(tl.int64)
    length = tl.load(seq_lens + seq)
    shift = tl.load(shifts + seq)
    table = block_table + seq.to(tl.int64) * table_stride

    rows = tl.arange(0, BLOCK_M)
    is_row = rows < GROUP
    heads = head * GROUP + rows
    dims = tl.arange(0, BLOCK_D)
    places = q + token * q_stride_t + heads[:, None] * q_stride_h + dims[None, :]
    query = tl.load(places, mask=is_row[:, None] & (dims < D)[None, :], other=0.0)
    if not KEEP_16:
        query = query.to(tl.float32)
    query_slots = tl.zeros([BLOCK_M], tl.int32) + (length - 1)

    first = 0
    if HAS_WINDOW and not HAS_POSITIONS:
        first = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(length - first, BLOCK_N)
    share = tl.cdiv(tiles, SPLITS) * BLOCK_N
    start = first + split * share
    stop = tl.minimum(start + share, length)

    top, total, acc = attend_slots(
        query,
        query_slots,
        start,
        stop,
        k_cache,
        v_cache,
        table,
        shift,
        masks + seq * 8,
        scale,
        cap,
        window,
        layer,
        head,
        KV_HEADS,
        S,
        D,
        DV,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_DV,
        HAS_SOFTCAP,
        HAS_WINDOW,
        HAS_POSITIONS,
        HAS_EVICTED,
        KEEP_16,
        PRECISION,
    )

    v_dims = tl.arange(0, BLOCK_DV)
    writable = is_row[:, None] & (v_dims < DV)[None, :]
    if SPLITS == 1:
        result = normalised(top, total, acc, sinks, heads, is_row, HAS_SINKS)
        places = out + (token * KV_HEADS * GROUP + heads)[:, None] * DV + v_dims[None, :]
        tl.store(places, result.to(out.dtype.element_ty), mask=writable)
    else:
        part = (index.to(tl.int64) * KV_HEADS * GROUP + heads) * SPLITS + split
        tl.store(part_max + part, top, mask=is_row)
        tl.store(part_sum + part, total, mask=is_row)
        writable = writable & (total > 0.0)[:, None]
        tl.store(part_acc + part[:, None] * DV + v_dims[None, :], acc, mask=writable)


@triton.jit
def reduce_kernel(
    out,
    part_max,
    part_sum,
    part_acc,
    seq_ids,
    query_starts,
    sinks,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (i, head): the splits of one query of one head become its row of out. Grid [n, H]."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_starts + tl.load(seq_ids + index)).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    part = (index.to(tl.int64) * HEADS + head) * SPLITS + splits
    sums = tl.load(part_sum + part)
    tops = tl.where(sums > 0.0, tl.load(part_max + part), NOTHING)
    top = tl.max(tops, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.where(top == NOTHING, 0.0, top)
    weights = tl.exp2(tops - top)
    total = tl.sum(weights * sums, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    dims = tl.arange(0, BLOCK_DV)
    mask = (sums > 0.0)[:, None] & (dims < DV)[None, :]
    acc = tl.load(part_acc + part[:, None] * DV + dims[None, :], mask=mask, other=0.0)
    result = tl.sum(acc * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (token * HEADS + head) * DV + dims, result.to(out.dtype.element_ty), mask=dims < DV)


@triton.jit
def tile_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tiles,
    query_starts,
    block_table,
    seq_lens,
    shifts,
    masks,
    sinks,
    scale,
    cap,
    window,
    layer,
    q_stride_t,
    q_stride_h,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
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
    HAS_SINKS: tl.constexpr,
    KEEP_16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, head): BLOCK_M // GROUP queries of one sequence, causally. Grid [tiles, K].

    tiles: [tiles, 2] int32, the sequence and the first query of each tile.
    """
    tile_id = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(tiles + 2 * tile_id)
    first_query = tl.load(tiles + 2 * tile_id + 1)
    token = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - token
    length = tl.load(seq_lens + seq)
    shift = tl.load(shifts + seq)
    table = block_table + seq.to(tl.int64) * table_stride

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    is_row = (queries < num_queries) & (rows < BLOCK_M // GROUP * GROUP)
    heads = head * GROUP + rows % GROUP
    tokens = (token + queries).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    places = q + (tokens * q_stride_t + heads * q_stride_h)[:, None] + dims[None, :]
    query = tl.load(places, mask=is_row[:, None] & (dims < D)[None, :], other=0.0)
    if not KEEP_16:
        query = query.to(tl.float32)
    query_slots = length - num_queries + queries

    start = 0
    if HAS_WINDOW and not HAS_POSITIONS:
        start = tl.maximum(length - num_queries + first_query - window + 1, 0) // BLOCK_N * BLOCK_N
    stop = tl.minimum(length - num_queries + first_query + BLOCK_M // GROUP, length)

    top, total, acc = attend_slots(
        query,
        query_slots,
        start,
        stop,
        k_cache,
        v_cache,
        table,
        shift,
        masks + seq * 8,
        scale,
        cap,
        window,
        layer,
        head,
        KV_HEADS,
        S,
        D,
        DV,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        BLOCK_DV,
        HAS_SOFTCAP,
        HAS_WINDOW,
        HAS_POSITIONS,
        HAS_EVICTED,
        KEEP_16,
        PRECISION,
    )

    result = normalised(top, total, acc, sinks, heads, is_row, HAS_SINKS)
    v_dims = tl.arange(0, BLOCK_DV)
    places = out + (tokens * KV_HEADS * GROUP + heads)[:, None] * DV + v_dims[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=is_row[:, None] & (v_dims < DV)[None, :])
