"""Attention over a paged cache as Triton kernels: split-KV decode, its reduction, and query tiles.

q and out [T, H, D]; block_table [N, W] int32. The G query heads of a KV head share each key: row m of
a tile is query m // G (always 0 when decoding), head m % G. Where G is too large for a tile, a KV head is
served by PIECES programs, each with BLOCK_M of its heads and one query.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.softmax import (
    LOG2_E,
    NOTHING,
    attend_slots,
    load_queries,
    normalised,
    real_values,
)


@triton.jit
def decode_kernel(
    q,
    store,
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
    L: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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

    Grid [n, K * PIECES, SPLITS]. Every sequence is cut into SPLITS runs of whole tiles by its own length, so
    that the grid depends on no length. With SPLITS = 1 writes out; else part_max and part_sum
    [n, H, SPLITS] of all splits and part_acc [n, H, SPLITS, Dv] of those that saw something.
    """
    index = tl.program_id(0)
    head = tl.program_id(1) // PIECES
    split = tl.program_id(2)
    seq = tl.load(seq_ids + index)
    token = tl.load(query_starts + seq).to(tl.int64)
    length = tl.load(seq_lens + seq)
    shift = tl.load(shifts + seq)
    table = block_table + seq.to(tl.int64) * table_stride

    rows = tl.program_id(1) % PIECES * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < GROUP
    heads = head * GROUP + rows
    query, latent = load_queries(q, token, heads, is_row, q_stride_t, q_stride_h, store, L, KEEP_16)
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
        latent,
        query_slots,
        start,
        stop,
        store,
        table,
        shift,
        masks + seq * 8,
        scale,
        cap,
        window,
        layer,
        head,
        L,
        BLOCK_M,
        BLOCK_N,
        HAS_SOFTCAP,
        HAS_WINDOW,
        HAS_POSITIONS,
        HAS_EVICTED,
        KEEP_16,
        PRECISION,
    )

    v_dims = tl.arange(0, L.BLOCK_DV)
    writable = is_row[:, None] & (v_dims < L.DV)[None, :]
    if SPLITS == 1:
        result = real_values(normalised(top, total, acc, sinks, heads, is_row, HAS_SINKS), store, L)
        places = out + (token * L.KV_HEADS * GROUP + heads)[:, None] * L.DV + v_dims[None, :]
        tl.store(places, result.to(out.dtype.element_ty), mask=writable)
    else:
        part = (index.to(tl.int64) * L.KV_HEADS * GROUP + heads) * SPLITS + split
        tl.store(part_max + part, top, mask=is_row)
        tl.store(part_sum + part, total, mask=is_row)
        writable = writable & (total > 0.0)[:, None]
        tl.store(part_acc + part[:, None] * L.DV + v_dims[None, :], acc, mask=writable)


@triton.jit
def reduce_kernel(
    out,
    store,
    part_max,
    part_sum,
    part_acc,
    seq_ids,
    query_starts,
    sinks,
    L: tl.constexpr,
    HEADS: tl.constexpr,
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
    dims = tl.arange(0, L.BLOCK_DV)
    mask = (sums > 0.0)[:, None] & (dims < L.DV)[None, :]
    acc = tl.load(part_acc + part[:, None] * L.DV + dims[None, :], mask=mask, other=0.0)
    result = tl.sum(acc * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    result = tl.reshape(real_values(result[None, :], store, L), [L.BLOCK_DV])
    tl.store(out + (token * HEADS + head) * L.DV + dims, result.to(out.dtype.element_ty), mask=dims < L.DV)


@triton.jit
def tile_kernel(
    q,
    store,
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
    L: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_EVICTED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KEEP_16: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, head): BLOCK_M // GROUP queries of one sequence, causally. Grid [tiles, K * PIECES].

    tiles: [tiles, 2] int32, the sequence and the first query of each tile.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP if PIECES == 1 else 1
    tile_id = tl.program_id(0)
    head = tl.program_id(1) // PIECES
    seq = tl.load(tiles + 2 * tile_id)
    first_query = tl.load(tiles + 2 * tile_id + 1)
    token = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - token
    length = tl.load(seq_lens + seq)
    shift = tl.load(shifts + seq)
    table = block_table + seq.to(tl.int64) * table_stride

    rows = tl.program_id(1) % PIECES * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    is_row = (queries < num_queries) & (rows < QUERIES * GROUP)
    heads = head * GROUP + rows % GROUP
    tokens = (token + queries).to(tl.int64)
    query, latent = load_queries(q, tokens, heads, is_row, q_stride_t, q_stride_h, store, L, KEEP_16)
    query_slots = length - num_queries + queries

    start = 0
    if HAS_WINDOW and not HAS_POSITIONS:
        start = tl.maximum(length - num_queries + first_query - window + 1, 0) // BLOCK_N * BLOCK_N
    stop = tl.minimum(length - num_queries + first_query + QUERIES, length)

    top, total, acc = attend_slots(
        query,
        latent,
        query_slots,
        start,
        stop,
        store,
        table,
        shift,
        masks + seq * 8,
        scale,
        cap,
        window,
        layer,
        head,
        L,
        BLOCK_M,
        BLOCK_N,
        HAS_SOFTCAP,
        HAS_WINDOW,
        HAS_POSITIONS,
        HAS_EVICTED,
        KEEP_16,
        PRECISION,
    )

    result = real_values(normalised(top, total, acc, sinks, heads, is_row, HAS_SINKS), store, L)
    v_dims = tl.arange(0, L.BLOCK_DV)
    places = out + (tokens * L.KV_HEADS * GROUP + heads)[:, None] * L.DV + v_dims[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=is_row[:, None] & (v_dims < L.DV)[None, :])
