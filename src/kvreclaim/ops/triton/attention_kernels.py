"""Attention over a paged cache as Triton kernels: decode, query tiles, and the reduction of their splits.

queries, seqs, rule, parts and A are the tuples of attention.py; out [T, H, Dv]. The G query heads of a KV
head share each key: row m of a tile is query m // G (always 0 when decoding), head m % G. Where G is too
large for a tile, a KV head is served by PIECES programs, each with BLOCK_M of its heads and one query.

Rows of the block table lie table_stride apart; layer: the index, by which slot positions differ. Both vary
from call to call, and Triton would compile anew for 1, for multiples of 16 and for others.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.softmax import (
    NOTHING,
    attend_slots,
    load_queries,
    normalised,
    real_values,
)


@triton.jit
def _write(
    out, parts, tokens, units, heads, is_row, sinks, top, total, acc, store, rule,
    L: tl.constexpr, A: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Write rows of a tile to out; of several splits to parts, of acc those rows that saw something. tokens,
    units, heads: [rows]"""
    HEADS: tl.constexpr = L.KV_HEADS * A.GROUP
    dims = tl.arange(0, L.BLOCK_DV)
    writable = is_row[:, None] & (dims < L.DV)[None, :]
    if not IS_SPLIT:
        result = real_values(normalised(top, total, acc, rule.sinks, sinks, is_row, A), store, L)
        places = out + (tokens * HEADS + heads)[:, None] * L.DV + dims[None, :]
        tl.store(places, result.to(out.dtype.element_ty), mask=writable)
    else:
        part = units * HEADS + heads
        tl.store(parts.top + part, top, mask=is_row)
        tl.store(parts.total + part, total, mask=is_row)
        saw = writable & (total > 0.0)[:, None]
        tl.store(parts.acc + part[:, None] * L.DV + dims[None, :], acc, mask=saw)


@triton.jit(do_not_specialize=["table_stride", "layer"])
def decode_kernel(
    queries, store, out, parts, units, seqs, rule, table_stride, layer,
    L: tl.constexpr, A: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (unit, head): the one query of a sequence over a share of its tiles, whole tiles by its length.

    units: [n] int32 sequences, or plan.SequenceShares.units (IS_SPLIT). Grid [units, K * PIECES]. Writes
    out, or parts of shares.
    """
    index = tl.program_id(0)
    head = tl.program_id(1) // A.PIECES
    if IS_SPLIT:
        own = units + 3 * index
        seq, split, splits = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        length = tl.load(seqs.seq_lens + seq, mask=splits > 0, other=0)
    else:
        seq, split, splits = tl.load(units + index), tl.program_id(2), 1  # as a constant 0 it takes registers
        length = tl.load(seqs.seq_lens + seq)
    token = tl.load(seqs.query_starts + seq).to(tl.int64)

    rows = tl.program_id(1) % A.PIECES * A.BLOCK_M + tl.arange(0, A.BLOCK_M)
    is_row = rows < A.GROUP
    heads = head * A.GROUP + rows
    query, latent = load_queries(queries, token, heads, is_row, store, L, A)
    query_slots = tl.full([A.BLOCK_M], 0, tl.int32) + (length - 1)

    first = 0
    if A.HAS_WINDOW and not A.HAS_POSITIONS:
        first = tl.maximum(length - rule.window, 0) // A.BLOCK_N * A.BLOCK_N
    tiles = tl.cdiv(length - first, A.BLOCK_N)
    share = tl.cdiv(tiles, tl.maximum(splits, 1)) * A.BLOCK_N
    start = first + split * share
    stop = tl.minimum(start + share, length)

    top, total, acc = attend_slots(
        query, latent, query_slots, start, stop, store, seqs, seq, head, rule, table_stride, layer, L, A
    )

    tokens = tl.full([A.BLOCK_M], 0, tl.int64) + token
    part = tl.full([A.BLOCK_M], 0, tl.int64) + index
    sinks = seq * L.KV_HEADS * A.GROUP + heads
    _write(out, parts, tokens, part, heads, is_row, sinks, top, total, acc, store, rule, L, A, IS_SPLIT)


@triton.jit(do_not_specialize=["table_stride", "layer"])
def tile_kernel(
    queries, store, out, parts, tiles, seqs, rule, table_stride, layer,
    L: tl.constexpr, A: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (tile, head, split): BLOCK_M // GROUP queries of a sequence, causally, over a share of slots.

    tiles: [tiles, 2] int32, the sequence and the first query of each tile. Grid [tiles, K * PIECES, splits].
    """
    QUERIES: tl.constexpr = A.BLOCK_M // A.GROUP if A.PIECES == 1 else 1
    tile_id = tl.program_id(0)
    head = tl.program_id(1) // A.PIECES
    seq = tl.load(tiles + 2 * tile_id)
    first_query = tl.load(tiles + 2 * tile_id + 1)
    token = tl.load(seqs.query_starts + seq)
    num_queries = tl.load(seqs.query_starts + seq + 1) - token
    length = tl.load(seqs.seq_lens + seq)

    rows = tl.program_id(1) % A.PIECES * A.BLOCK_M + tl.arange(0, A.BLOCK_M)
    query_in_tile = rows // A.GROUP
    place = first_query + query_in_tile
    is_row = (place < num_queries) & (rows < QUERIES * A.GROUP)
    heads = head * A.GROUP + rows % A.GROUP
    tokens = (token + place).to(tl.int64)
    query, latent = load_queries(queries, tokens, heads, is_row, store, L, A)
    query_slots = length - num_queries + place

    start = 0
    if A.HAS_WINDOW and not A.HAS_POSITIONS:
        first = tl.maximum(length - num_queries + first_query - rule.window + 1, 0)
        start = first // A.BLOCK_N * A.BLOCK_N
    stop = tl.minimum(length - num_queries + first_query + QUERIES, length)
    if IS_SPLIT:
        share = tl.cdiv(tl.cdiv(stop - start, A.BLOCK_N), tl.num_programs(2)) * A.BLOCK_N
        start += tl.program_id(2) * share
        stop = tl.minimum(start + share, stop)

    top, total, acc = attend_slots(
        query, latent, query_slots, start, stop, store, seqs, seq, head, rule, table_stride, layer, L, A
    )
    part = (tile_id.to(tl.int64) * QUERIES + query_in_tile) * tl.num_programs(2) + tl.program_id(2)
    sinks = seq * L.KV_HEADS * A.GROUP + heads
    _write(out, parts, tokens, part, heads, is_row, sinks, top, total, acc, store, rule, L, A, IS_SPLIT)


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    out, store, parts, tiles, firsts, splits, seqs, rule, L: tl.constexpr, A: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, head): the shares of one query of one head become its row of out. Grid [n * QUERIES, H].

    tiles: of tile_kernel, with so many queries each, cut into `splits`; with QUERIES = 0 the sequences of
    decode_kernel [n], which `firsts` cuts. BLOCK: shares at a time
    """
    HEADS: tl.constexpr = L.KV_HEADS * A.GROUP
    index = tl.program_id(0)
    head = tl.program_id(1)
    if QUERIES == 0:
        seq = tl.load(tiles + index)
        token = tl.load(seqs.query_starts + seq).to(tl.int64)
        unit = tl.load(firsts + index)
        count = tl.load(firsts + index + 1) - unit
        end = token + 1
    else:
        tile = tiles + 2 * (index // QUERIES)
        seq = tl.load(tile)
        end = tl.load(seqs.query_starts + seq + 1).to(tl.int64)
        token = tl.load(seqs.query_starts + seq).to(tl.int64) + tl.load(tile + 1) + index % QUERIES
        unit = index * splits
        count = tl.where(token < end, splits, 0)
    dims = tl.arange(0, L.BLOCK_DV)
    top, total = tl.full([1], NOTHING, tl.float32), tl.full([1], 0, tl.float32)
    acc = tl.full([L.BLOCK_DV], 0, tl.float32)
    first = unit.to(tl.int64) * HEADS + head
    for at in range(0, count, BLOCK):
        shares = at + tl.arange(0, BLOCK)
        part = shares * HEADS
        sums = tl.load(parts.total + first + part, mask=shares < count, other=0.0)
        saw = sums > 0.0
        tops = tl.where(saw, tl.load(parts.top + first + part, mask=shares < count, other=0.0), NOTHING)
        higher = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(higher == NOTHING, 0.0, higher)
        weights, fade = tl.exp2(tops - base), tl.exp2(top - base)
        mask = saw[:, None] & (dims < L.DV)[None, :]
        places = parts.acc + first * L.DV + (part[:, None] * L.DV + dims[None, :])
        values = tl.load(places, mask=mask, other=0.0)
        acc = acc * fade + tl.sum(values * weights[:, None], axis=0)
        total = total * fade + tl.sum(weights * sums, axis=0)
        top = higher
    result = normalised(top, total, acc[None, :], rule.sinks, seq * HEADS + head, True, A)
    result = tl.reshape(real_values(result, store, L), [L.BLOCK_DV])
    writable = dims < tl.where(token < end, L.DV, 0)
    tl.store(out + (token * HEADS + head) * L.DV + dims, result.to(out.dtype.element_ty), mask=writable)
