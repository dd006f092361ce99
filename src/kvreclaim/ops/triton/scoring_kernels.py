"""Scores of cached keys, read where they lie. Rows of queries are padded to whole tiles of tl.dot.

A latent cache's keys are its values followed by the stored dims; queries are [.., Dv + D] likewise. Its
values are read a CHUNK of dims at a time, from a plain format only.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.codes import PLAIN, load_real, load_tile
from kvreclaim.ops.triton.slots import stacked_rows
from kvreclaim.ops.triton.softmax import NOTHING

WHOLE_DIMS = 128
"""Keys of more stored dims are multiplied in parts of CHUNK dims: whole operands of tl.dot would not fit in
registers."""
WHOLE = tl.constexpr(WHOLE_DIMS)
CHUNK = tl.constexpr(64)


@triton.jit
def _dims_of(x, rows, valid, stride, dims, D: tl.constexpr):
    """fp32 tile of rows (queries, centres, weights or plain keys), zero where not valid and from dim D on."""
    mask = valid[:, None] & (dims < D)[None, :]
    return tl.load(x + rows[:, None] * stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _plain_products(x, queries, is_query, stride, plane, rows, valid, D: tl.constexpr, SQUARED, PRECISION):
    """[queries, BLOCK_N] fp32: D dims of x's rows times rows of a plain plane, or their squares."""
    products = tl.full([queries.shape[0], rows.shape[0]], 0, tl.float32)
    for first in range(0, D, CHUNK):
        dims = first + tl.arange(0, CHUNK)
        keys = _dims_of(plane, rows, valid, D, dims, D)
        keys = tl.trans(keys * keys if SQUARED else keys)
        tile = _dims_of(x, queries, is_query, stride, dims, D)
        products += tl.dot(tile, keys, input_precision=PRECISION)
    return products


@triton.jit
def _tile_products(x, queries, is_query, stride, keys, D: tl.constexpr, FIRST, STEP, PRECISION):
    """[queries, BLOCK_N] fp32: x's rows times a tile; its columns are every STEP-th dim from FIRST on."""
    if D > WHOLE and keys.shape[1] > CHUNK:
        even, odd = tl.split(tl.reshape(keys, [keys.shape[0], keys.shape[1] // 2, 2]))
        products = _tile_products(x, queries, is_query, stride, even, D, FIRST, 2 * STEP, PRECISION)
        products += _tile_products(x, queries, is_query, stride, odd, D, FIRST + STEP, 2 * STEP, PRECISION)
    else:
        tile = _dims_of(x, queries, is_query, stride, FIRST + STEP * tl.arange(0, keys.shape[1]), D)
        products = tl.dot(tile, tl.trans(keys), input_precision=PRECISION)
    return products


@triton.jit
def _products(x, queries, is_query, keys, store, rows, valid, L: tl.constexpr, SQUARED, PRECISION):
    """[queries, BLOCK_N] fp32: x's rows times keys, or their squares. keys: the tile of their stored dims
    [BLOCK_N, BLOCK_D]; wide ones of a plain format are read again."""
    FIRST: tl.constexpr = L.DV if L.LATENT else 0
    stride, own = FIRST + L.D, x + FIRST
    if L.K_FORMAT == PLAIN and L.BLOCK_D > WHOLE:
        products = _plain_products(
            own, queries, is_query, stride, store.k, rows, valid, L.D, SQUARED, PRECISION
        )
    else:
        tile = keys * keys if SQUARED else keys
        products = _tile_products(own, queries, is_query, stride, tile, L.D, 0, 1, PRECISION)
    if L.LATENT:
        products += _plain_products(
            x, queries, is_query, stride, store.v, rows, valid, L.DV, SQUARED, PRECISION
        )
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

    scores = tl.full([GROUP_ROWS, BLOCK_N], 0, tl.float32)
    tile = store.k
    if L.K_FORMAT != PLAIN or (HAS_QUERIES and L.BLOCK_D <= WHOLE):
        tile = load_real(store, rows, valid, L, 0)
    if HAS_QUERIES:
        best = tl.full([GROUP_ROWS, BLOCK_N], NOTHING, tl.float32)
        for first in range(0, num_queries, SHARE):
            is_row = (member < GROUP) & (first + place < num_queries)
            row = heads * num_queries + first + place
            products = _products(queries, row, is_row, tile, store, rows, valid, L, False, PRECISION)
            products = tl.where((first + place < num_queries)[:, None], products, NOTHING)
            best = tl.maximum(best, tl.max(tl.reshape(products, [SHARE, GROUP_ROWS, BLOCK_N]), axis=0))
        scores += best
    if HAS_WEIGHTS:
        norms = tl.sqrt(
            _band_powers(tile, store, rows, valid, BANDS, BAND_START, BAND_STEP, IMAG_SHIFT, BLOCK_F, L)
        )
        query = _dims_of(weights, heads, (member < GROUP) & (place == 0), BANDS, tl.arange(0, BLOCK_F), BANDS)
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
    IS_SCORE_PASS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, head): BLOCK_N tokens against all centres (rows (query head, centre) of the KV head)
    at all offsets. Logits live in registers only; the second pass computes them again.

    First pass: part_max and part_sum [tiles, K, rows, O] of each row's softmax over this tile.
    Score pass: out [K, T] from normalisers [K, rows, O], the log of each softmax's denominator.
    """
    tile_id = tl.program_id(0)
    head = tl.program_id(1)
    tokens = first_token + tile_id * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = tokens < stop_token
    rows = stacked_rows(block_ids, num_blocks, tokens, valid, head, L.KV_HEADS, L.S, STACKED)
    keys = store.k
    if L.K_FORMAT != PLAIN or L.BLOCK_D <= WHOLE:
        keys = load_real(store, rows, valid, L, 0)
    best = tl.full([BLOCK_N], 0, tl.float32)
    for first in range(0, num_centers, TILE_ROWS):
        row = first + tl.arange(0, TILE_ROWS)
        is_row = row < num_centers
        center = head * num_centers + row
        spread = _products(variances, center, is_row, keys, store, rows, valid, L, True, PRECISION)
        spread *= scale * scale * 0.5
        mean = tl.full([TILE_ROWS, BLOCK_N], 0, tl.float32)
        for offset in range(0, num_offsets):
            column = center.to(tl.int64) * num_offsets + offset
            products = _products(centers, column, is_row, keys, store, rows, valid, L, False, PRECISION)
            logits = products * scale + spread
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
