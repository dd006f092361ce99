"""Scores of cached keys, read where they lie. Rows of queries are padded to whole tiles of tl.dot.

A latent cache's keys are its values followed by the stored dims; queries are [.., Dv + D] likewise. Its
values are wide: they are read and multiplied a CHUNK of dims at a time, from a plain format only.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.codes import PLAIN, load_real, load_tile
from kvreclaim.ops.triton.slots import stacked_rows
from kvreclaim.ops.triton.softmax import NOTHING


@triton.jit
def _query_rows(x, rows, valid, row_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 rows of queries (or centres, weights) for tl.dot, zero where not valid and past D."""
    dims = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dims < D)[None, :]
    return tl.load(x + rows[:, None] * row_stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _latent_products(
    x,
    store,
    queries,
    is_query,
    rows,
    valid,
    L: tl.constexpr,
    CHUNK: tl.constexpr,
    SQUARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[queries, BLOCK_N] fp32: the first Dv dims of x's rows [_, Dv + D] times values, or their squares."""
    products = tl.zeros([queries.shape[0], rows.shape[0]], tl.float32)
    dims = tl.arange(0, CHUNK)
    for first in range(0, L.DV, CHUNK):
        inside = (first + dims < L.DV)[None, :]
        places = x + queries[:, None] * (L.DV + L.D) + (first + dims)[None, :]
        tile = tl.load(places, mask=is_query[:, None] & inside, other=0.0)
        places = store.v + rows[:, None] * L.DV + (first + dims)[None, :]
        values = tl.trans(tl.load(places, mask=valid[:, None] & inside, other=0.0).to(tl.float32))
        if SQUARED:
            values = values * values
        products += tl.dot(tile, values, input_precision=PRECISION)
    return products


@triton.jit
def _band_powers(
    keys, store, rows, valid, BANDS: tl.constexpr, START, STEP, SHIFT, BLOCK_F: tl.constexpr, L: tl.constexpr
):
    """[BLOCK_N, BLOCK_F] fp32: squared norms of pairs of stored dims, START + STEP * f and SHIFT beyond.
    keys: the tile that they are taken from where the format is not plain."""
    bands = tl.arange(0, BLOCK_F)
    dims = START + bands * STEP
    if L.K_FORMAT == PLAIN:
        mask = valid[:, None] & (bands < BANDS)[None, :]
        places = store.k + rows[:, None] * L.D + dims[None, :]
        real = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        imag = tl.load(places + SHIFT, mask=mask, other=0.0).to(tl.float32)
    else:
        dims = tl.broadcast_to(tl.where(bands < BANDS, dims, 0)[None, :], [rows.shape[0], BLOCK_F])
        real = tl.gather(keys, dims, axis=1)
        imag = tl.gather(keys, tl.where((bands < BANDS)[None, :], dims + SHIFT, 0), axis=1)
    return real * real + imag * imag


@triton.jit(do_not_specialize=["num_blocks", "num_tokens"])
def trig_norm_kernel(
    store,
    out,
    queries,
    weights,
    block_ids,
    num_blocks,
    num_tokens,
    num_queries,
    L: tl.constexpr,
    STACKED: tl.constexpr,
    GROUP: tl.constexpr,
    BANDS: tl.constexpr,
    BAND_START: tl.constexpr,
    BAND_STEP: tl.constexpr,
    IMAG_SHIFT: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, head): scores of BLOCK_N tokens for all query heads of a KV head; K is read once. Where
    the heads are too many for a tile, PIECES programs share them.

    A tile of rows is TILE_ROWS // GROUP_ROWS queries of each of the group's (padded) heads: row m is
    query m // GROUP_ROWS of head m % GROUP_ROWS. BAND_START is a stored dim.
    """
    head = tl.program_id(1) // PIECES
    first_member = tl.program_id(1) % PIECES * GROUP_ROWS
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = tokens < num_tokens
    rows = stacked_rows(block_ids, num_blocks, tokens, valid, head, L.KV_HEADS, L.S, STACKED)
    member = first_member + tl.arange(0, TILE_ROWS) % GROUP_ROWS
    place = tl.arange(0, TILE_ROWS) // GROUP_ROWS
    heads = head * GROUP + member
    SHARE: tl.constexpr = TILE_ROWS // GROUP_ROWS
    FIRST: tl.constexpr = L.DV if L.LATENT else 0

    scores = tl.full([GROUP_ROWS, BLOCK_N], 0, tl.float32)
    tile = store.k
    if HAS_QUERIES or L.K_FORMAT != PLAIN:
        tile = load_real(store, rows, valid, L, 0)
    if HAS_QUERIES:
        keys = tl.trans(tile)
        best = tl.full([GROUP_ROWS, BLOCK_N], NOTHING, tl.float32)
        for first in range(0, num_queries, SHARE):
            is_row = (member < GROUP) & (first + place < num_queries)
            row = heads * num_queries + first + place
            query = _query_rows(queries + FIRST, row, is_row, FIRST + L.D, L.D, L.BLOCK_D)
            products = tl.dot(query, keys, input_precision=PRECISION)
            if L.LATENT:
                products += _latent_products(
                    queries, store, row, is_row, rows, valid, L, CHUNK, False, PRECISION
                )
            products = tl.where((first + place < num_queries)[:, None], products, NOTHING)
            best = tl.maximum(best, tl.max(tl.reshape(products, [SHARE, GROUP_ROWS, BLOCK_N]), axis=0))
        scores += best
    if HAS_WEIGHTS:
        norms = tl.sqrt(
            _band_powers(tile, store, rows, valid, BANDS, BAND_START, BAND_STEP, IMAG_SHIFT, BLOCK_F, L)
        )
        query = _query_rows(weights, heads, (member < GROUP) & (place == 0), BANDS, BANDS, BLOCK_F)
        products = tl.dot(query, tl.trans(norms), input_precision=PRECISION)
        scores += tl.sum(tl.reshape(products, [SHARE, GROUP_ROWS, BLOCK_N]), axis=0)
    member = first_member + tl.arange(0, GROUP_ROWS)
    places = (head * GROUP + member).to(tl.int64)[:, None] * num_tokens + tokens[None, :]
    tl.store(out + places, scores, mask=(member < GROUP)[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["num_blocks", "first_token", "stop_token", "num_tokens"])
def mixture_kernel(
    store,
    out,
    part_max,
    part_sum,
    normalisers,
    centers,
    variances,
    block_ids,
    num_blocks,
    scale,
    first_token,
    stop_token,
    num_tokens,
    num_centers,
    num_offsets,
    L: tl.constexpr,
    STACKED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_SCORE_PASS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, head): BLOCK_N tokens against all centres (rows (query head, centre) of the KV head)
    at all offsets. Logits live in registers only; the second pass computes them again.

    First pass: part_max and part_sum [tiles, K, rows, O] of each row's softmax over this tile.
    Score pass: out [K, T] from normalisers [K, rows, O], the log of each softmax's denominator.
    """
    FIRST: tl.constexpr = L.DV if L.LATENT else 0
    DIMS: tl.constexpr = FIRST + L.D
    tile_id = tl.program_id(0)
    head = tl.program_id(1)
    tokens = first_token + tile_id * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = tokens < stop_token
    rows = stacked_rows(block_ids, num_blocks, tokens, valid, head, L.KV_HEADS, L.S, STACKED)
    keys = tl.trans(load_real(store, rows, valid, L, 0))
    squares = keys * keys
    best = tl.full([BLOCK_N], 0, tl.float32)
    for first in range(0, num_centers, TILE_ROWS):
        row = first + tl.arange(0, TILE_ROWS)
        is_row = row < num_centers
        center = head * num_centers + row
        tile = _query_rows(variances + FIRST, center, is_row, DIMS, L.D, L.BLOCK_D) * (scale * scale * 0.5)
        spread = tl.dot(tile, squares, input_precision=PRECISION)
        if L.LATENT:
            more = _latent_products(variances, store, center, is_row, rows, valid, L, CHUNK, True, PRECISION)
            spread += more * (scale * scale * 0.5)
        mean = tl.full([TILE_ROWS, BLOCK_N], 0, tl.float32)
        for offset in range(0, num_offsets):
            column = center.to(tl.int64) * num_offsets + offset
            tile = _query_rows(centers + FIRST, column, is_row, DIMS, L.D, L.BLOCK_D) * scale
            logits = tl.dot(tile, keys, input_precision=PRECISION) + spread
            if L.LATENT:
                more = _latent_products(
                    centers, store, column, is_row, rows, valid, L, CHUNK, False, PRECISION
                )
                logits += more * scale
            if IS_SCORE_PASS:
                denominator = tl.load(normalisers + column, mask=is_row, other=0.0)
                probs = tl.exp(tl.minimum(logits - denominator[:, None], 0.0))
                mean += tl.where(is_row[:, None], probs, 0.0)
            else:
                logits = tl.where(valid[None, :], logits, NOTHING)
                top = tl.max(logits, axis=1)
                total = tl.sum(tl.exp(logits - top[:, None]), axis=1)
                column += tile_id.to(tl.int64) * tl.num_programs(1) * num_centers * num_offsets
                tl.store(part_max + column, top, mask=is_row)
                tl.store(part_sum + column, total, mask=is_row)
        if IS_SCORE_PASS:
            best = tl.maximum(best, tl.max(mean, axis=0) / num_offsets)
    if IS_SCORE_PASS:
        tl.store(out + head.to(tl.int64) * num_tokens + tokens, best, mask=valid)


@triton.jit(do_not_specialize=["num_blocks", "num_tokens"])
def norm_kernel(
    store,
    out,
    block_ids,
    num_blocks,
    num_tokens,
    L: tl.constexpr,
    STACKED: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (tile, head): Euclidean norms of BLOCK_N keys (SIDE 0) or values of one head. A rotation keeps
    them."""
    head = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = tokens < num_tokens
    rows = stacked_rows(block_ids, num_blocks, tokens, valid, head, L.KV_HEADS, L.S, STACKED)
    tile = load_tile(store, rows, valid, L, SIDE, False)
    squares = tl.sum(tile * tile, axis=1)
    if L.LATENT and SIDE == 0:
        tile = load_tile(store, rows, valid, L, 1, False)
        squares += tl.sum(tile * tile, axis=1)
    tl.store(out + head.to(tl.int64) * num_tokens + tokens, tl.sqrt(squares), mask=valid)


@triton.jit
def _weighted(tile, weights, is_weight, places):
    """[BLOCK_N] fp32: rows of a tile [BLOCK_N, dims] times the weights at their places."""
    return tl.sum(tile * tl.load(weights + places, mask=is_weight, other=0.0), axis=1)


@triton.jit(do_not_specialize=["num_blocks", "num_tokens"])
def surrogate_kernel(
    store,
    out,
    weights,
    owners,
    block_ids,
    num_blocks,
    num_tokens,
    L: tl.constexpr,
    STACKED: tl.constexpr,
    BANDS: tl.constexpr,
    BAND_START: tl.constexpr,
    BAND_STEP: tl.constexpr,
    IMAG_SHIFT: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    ENERGY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Program (tile, head): BLOCK_N tokens of one head; keys and values are read once. A row of weights
    [R, P]: BANDS, the key's other dims, DV, |k|, ln |v|, 1. BAND_START is a stored dim."""
    FIRST: tl.constexpr = L.DV if L.LATENT else 0
    VALUES: tl.constexpr = FIRST + L.D - BANDS
    END: tl.constexpr = BAND_START + 2 * BANDS
    head = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = tokens < num_tokens
    rows = stacked_rows(block_ids, num_blocks, tokens, valid, head, L.KV_HEADS, L.S, STACKED)
    if HAS_OWNERS:
        own = weights + tl.load(owners + tokens // L.S, mask=valid, other=0) * (VALUES + L.DV + 3)
    else:
        own = weights + head * (VALUES + L.DV + 3) + tokens * 0
    dims = tl.arange(0, L.BLOCK_D)[None, :]
    keys = load_real(store, rows, valid, L, 0)
    is_rest = valid[:, None] & ((dims < BAND_START) | (dims >= END)) & (dims < L.D)
    places = BANDS + FIRST + tl.where(dims < BAND_START, dims, dims - 2 * BANDS)
    scores = _weighted(keys, own[:, None], is_rest, places)
    squares = tl.sum(keys * keys, axis=1)
    if BANDS:
        powers = _band_powers(keys, store, rows, valid, BANDS, BAND_START, BAND_STEP, IMAG_SHIFT, BLOCK_F, L)
        bands = tl.arange(0, BLOCK_F)[None, :]
        scores += _weighted(tl.log(powers + ENERGY), own[:, None], valid[:, None] & (bands < BANDS), bands)
    values = load_real(store, rows, valid, L, 1)
    dims = tl.arange(0, L.BLOCK_DV)[None, :]
    is_value = valid[:, None] & (dims < L.DV)
    scores += _weighted(values, own[:, None], is_value, VALUES + dims)
    lengths = tl.sum(values * values, axis=1)
    if L.LATENT:
        scores += _weighted(values, own[:, None], is_value, BANDS + dims)
        squares += lengths
    last = own + VALUES + L.DV
    scores += tl.sqrt(squares) * tl.load(last, mask=valid, other=0.0)
    scores += tl.log(tl.sqrt(lengths) + ENERGY) * tl.load(last + 1, mask=valid, other=0.0)
    scores += tl.load(last + 2, mask=valid, other=0.0)
    tl.store(out + head.to(tl.int64) * num_tokens + tokens, scores, mask=valid)
