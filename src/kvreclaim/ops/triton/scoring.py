"""Scores of cached keys: ops.scoring documents each function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kvreclaim.kv_bytes import VectorBytes
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.ops.scoring import ENERGY
from kvreclaim.ops.triton.layout import layout_of, store_of
from kvreclaim.ops.triton.scoring_kernels import (
    WHOLE_DIMS,
    mixture_kernel,
    norm_kernel,
    surrogate_kernel,
    trig_norm_kernel,
)
from kvreclaim.ops.triton.support import MAX_HEAD_DIM, dot_precision, padded
from kvreclaim.ops.triton.writes import gather_tokens

ROWS = 16


def trig_norm_scores(
    tokens: PagedTokens, queries: Tensor, weights: Tensor | None, layout: RopeLayout
) -> Tensor:
    """scoring.trig_norm_scores of a paged sequence's keys: [H, T] fp32, in one pass over K."""
    tokens = _scored(tokens)
    cache, num_tokens = tokens.cache, tokens.num_tokens
    heads, num_queries = queries.shape[:2]
    out = torch.empty((heads, num_tokens), dtype=torch.float32, device=cache.device)
    group = heads // tokens.num_heads
    group_rows = 1 << (group - 1).bit_length()
    if cache.shape.latent:
        group_rows = min(group_rows, ROWS)
    pieces = triton.cdiv(group, group_rows)
    bands = 0 if weights is None else layout.num_bands
    is_half = layout.style == "half"
    where = layout_of(cache)
    columns = where.BLOCK_D
    block_n = _tile_tokens(columns * _decoded(cache, cache.format.keys))
    start = layout.start - (cache.v_head_dim if cache.shape.latent else 0)
    assert start >= 0 or not bands, "the bands of a latent key are among its rotary dims"
    queries = _as_rows(queries, cache)
    if num_tokens:
        trig_norm_kernel[(triton.cdiv(num_tokens, block_n), tokens.num_heads * pieces)](
            store_of(tokens.layer),
            out,
            queries,
            queries if weights is None else _as_rows(weights, cache),
            tokens.block_ids,
            tokens.block_ids.shape[-1],
            num_tokens,
            num_queries,
            L=where,
            STACKED=tokens.is_stacked,
            GROUP=group,
            BANDS=bands,
            BAND_START=start,
            BAND_STEP=1 if is_half else 2,
            IMAG_SHIFT=layout.num_bands if is_half else 1,
            HAS_QUERIES=num_queries > 0,
            HAS_WEIGHTS=bands > 0,
            GROUP_ROWS=group_rows,
            TILE_ROWS=max(ROWS, group_rows),
            BLOCK_N=block_n,
            BLOCK_F=padded(max(1, bands)),
            PIECES=pieces,
            PRECISION=dot_precision(cache.device),
            num_warps=4 if columns <= WHOLE_DIMS or cache.format.is_plain else 8,
            num_stages=1,
        )
    return out


def mixture_scores(
    tokens: PagedTokens, centers: Tensor, variances: Tensor, scale: float, over: slice
) -> Tensor:
    """scoring.mixture_scores of a paged sequence's keys: [K, T] fp32, in two passes over K.

    Between them only each softmax's maximum and sum per tile of tokens are kept.
    """
    tokens = _scored(tokens, WHOLE_DIMS)
    cache, num_tokens = tokens.cache, tokens.num_tokens
    out = torch.zeros((tokens.num_heads, num_tokens), dtype=torch.float32, device=cache.device)
    start, stop, step = over.indices(num_tokens)
    assert step == 1, f"over has step {step}, 1 expected"
    if start >= stop:
        return out
    heads, count, offsets, _ = centers.shape
    where = layout_of(cache)
    block_n = _tile_tokens(2 * min(where.BLOCK_D, WHOLE_DIMS))
    tiles = triton.cdiv(stop - start, block_n)
    rows = heads // tokens.num_heads * count
    part_max, part_sum = (
        torch.empty((tiles, tokens.num_heads, rows, offsets), dtype=torch.float32, device=cache.device)
        for _ in range(2)
    )
    centers, variances = _as_rows(centers, cache), _as_rows(variances, cache)

    def run(normalisers: Tensor, is_score_pass: bool) -> None:
        mixture_kernel[(tiles, tokens.num_heads)](
            store_of(tokens.layer),
            out,
            part_max,
            part_sum,
            normalisers,
            centers,
            variances,
            tokens.block_ids,
            tokens.block_ids.shape[-1],
            scale,
            start,
            stop,
            num_tokens,
            rows,
            offsets,
            L=where,
            STACKED=tokens.is_stacked,
            TILE_ROWS=ROWS,
            BLOCK_N=block_n,
            IS_SCORE_PASS=is_score_pass,
            PRECISION=dot_precision(cache.device),
            num_warps=4,
            num_stages=1,
        )

    run(part_max, False)
    top = part_max.amax(dim=0)
    run(top + (part_sum * (part_max - top).exp()).sum(dim=0).log(), True)
    return out


def token_norms(tokens: PagedTokens, *, values: bool) -> Tensor:
    """reference.token_norms: [K, T] fp32."""
    cache, num_tokens = tokens.cache, tokens.num_tokens
    layout = layout_of(cache)
    out = torch.empty((tokens.num_heads, num_tokens), dtype=torch.float32, device=cache.device)
    block_n = _tile_tokens(layout.BLOCK_DV if values or layout.LATENT else layout.BLOCK_D)
    if num_tokens:
        norm_kernel[(triton.cdiv(num_tokens, block_n), tokens.num_heads)](
            store_of(tokens.layer),
            out,
            tokens.block_ids,
            tokens.block_ids.shape[-1],
            num_tokens,
            L=layout,
            STACKED=tokens.is_stacked,
            SIDE=int(values),
            BLOCK_N=block_n,
            num_warps=4,
        )
    return out


def surrogate_scores(
    tokens: PagedTokens, weights: Tensor, layout: RopeLayout | None, owners: Tensor | None = None
) -> Tensor:
    """reference.surrogate_scores: [K, T] fp32, in one pass over K and V."""
    tokens = _scored(tokens)
    cache, num_tokens = tokens.cache, tokens.num_tokens
    where = layout_of(cache)
    out = torch.empty((tokens.num_heads, num_tokens), dtype=torch.float32, device=cache.device)
    bands = 0 if layout is None else layout.num_bands
    is_half = layout is None or layout.style == "half"
    start = 0
    if layout is not None and bands:
        start = layout.start - (cache.v_head_dim if cache.shape.latent else 0)
        assert start >= 0, "the bands of a latent key are among its rotary dims"
    block_n = _tile_tokens((where.BLOCK_D + where.BLOCK_DV) * _decoded(cache, cache.format.values))
    if num_tokens:
        surrogate_kernel[(triton.cdiv(num_tokens, block_n), tokens.num_heads)](
            store_of(tokens.layer),
            out,
            _as_rows(weights, cache),
            tokens.block_ids if owners is None else owners,
            tokens.block_ids,
            tokens.block_ids.shape[-1],
            num_tokens,
            L=where,
            STACKED=tokens.is_stacked,
            BANDS=bands,
            BAND_START=start,
            BAND_STEP=1 if is_half else 2,
            IMAG_SHIFT=bands if is_half else 1,
            HAS_OWNERS=owners is not None,
            ENERGY=ENERGY,
            BLOCK_N=block_n,
            BLOCK_F=padded(max(1, bands)),
            num_warps=4,
        )
    return out


def _scored(tokens: PagedTokens, most_dims: int = MAX_HEAD_DIM) -> PagedTokens:
    """Return the tokens as kernels score them: codes as numbers, in separate blocks of one head, where the
    cache is latent or its keys have more dims; these then are the values, too."""
    cache = tokens.cache
    is_latent = cache.shape.latent
    if cache.format.is_plain or not (is_latent or cache.head_dim > most_dims):
        return tokens
    keys, values = gather_tokens(tokens)
    keys, values = (keys[..., cache.v_head_dim :], values) if is_latent else (keys, keys)
    blocks = triton.cdiv(tokens.num_tokens, cache.block_size)
    spare = blocks * cache.block_size - tokens.num_tokens
    k, v = (
        F.pad(x, (0, 0, 0, spare)).reshape(1, -1, 1, cache.block_size, x.shape[-1]) for x in (keys, values)
    )
    ids = torch.arange(len(keys) * blocks, device=cache.device).view(-1, blocks)
    copy = KVCache.plain(k, v, (tokens.layer.softmax,), latent=is_latent)
    return PagedTokens(copy.layers[0], ids, tokens.num_tokens)


def _as_rows(x: Tensor, cache: KVCache) -> Tensor:
    return x.to(cache.device, torch.float32).contiguous()


def _decoded(cache: KVCache, form: VectorBytes) -> int:
    """Weight of a token's numbers: four bits take as many registers again to be decoded, but for
    wide rows, of which a tile has few tokens."""
    return 2 if form.bits == 4 and layout_of(cache).BLOCK_D <= WHOLE_DIMS else 1


def _tile_tokens(floats_per_token: int) -> int:
    """Tokens of a tile of K, at most 32 KiB in fp32 and 64 tokens; powers of two."""
    return max(16, min(64, 1 << (8192 // floats_per_token).bit_length() - 1))
