"""paged_attention and decode_attention: choose tiles and splits, launch the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.triton.attention_kernels import decode_kernel, reduce_kernel, tile_kernel
from kvreclaim.ops.triton.layout import layout_of, store_of
from kvreclaim.ops.triton.plan import (
    DecodeTables,
    Masks,
    batch_masks,
    decode_tables,
    query_tiles,
)
from kvreclaim.ops.triton.support import dot_precision, keeps_16_bits, new_output, padded

LOG2_E = 1.4426950408889634
QUERY_ROWS = 64
"""Rows of a query tile: queries times the query heads of a KV head."""
DECODE_ROWS = 16
LATENT_ROWS = 16


@dataclass(frozen=True, slots=True)
class HeadTile:
    """rows of a tile, the queries among them, and how many tiles the query heads of a KV head take."""

    rows: int
    queries: int
    pieces: int


def paged_attention(
    q: Tensor,
    layer: LayerCache,
    batch: AttentionBatch,
) -> Tensor:
    """ops.reference.paged_attention: sequences with one query are split over their keys, the others
    are cut into tiles of queries."""
    q, cache = _with_rows(q), layer.cache
    out = new_output(q, q.shape[0], q.shape[1], cache.v_head_dim)
    masks = batch_masks(batch)
    tables = decode_tables(batch, cache.num_kv_heads * _heads(q, cache, DECODE_ROWS).pieces)
    if tables is not None:
        _decode(q, layer, tables, masks, out)
    heads = _heads(q, cache, _query_rows(q, cache))
    tiles = query_tiles(batch, heads.queries)
    if tiles is not None:
        _prefill(q, layer, batch, tiles, heads, masks, out)
    return out.to(q.dtype)


def decode_attention(
    q: Tensor,
    layer: LayerCache,
    tables: DecodeTables,
) -> Tensor:
    """One query per sequence, everything about lengths read from the tables' tensors.

    Returns: [n, H, Dv], dtype of q [n, H, D]; zero rows for sequences of length 0. Mutates nothing.
    """
    q = _with_rows(q)
    out = new_output(q, q.shape[0], q.shape[1], layer.cache.v_head_dim)
    _decode(q, layer, tables, None, out)
    return out.to(q.dtype)


def _decode(
    q: Tensor,
    layer: LayerCache,
    tables: DecodeTables,
    masks: Masks | None,
    out: Tensor,
) -> None:
    """Writes the rows of tables.seq_ids into out."""
    cache, sinks = layer.cache, layer.softmax.sinks
    rows, heads, splits = tables.seq_ids.shape[0], q.shape[1], tables.num_splits
    tile = _heads(q, cache, DECODE_ROWS)
    shape = (rows, heads, splits if splits > 1 else 0)
    top, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    acc = torch.empty((*shape, cache.v_head_dim), dtype=torch.float32, device=q.device)
    decode_kernel[(rows, cache.num_kv_heads * tile.pieces, splits)](
        q,
        out=out,
        part_max=top,
        part_sum=total,
        part_acc=acc,
        seq_ids=tables.seq_ids,
        query_starts=tables.query_starts,
        block_table=tables.block_table,
        seq_lens=tables.seq_lens,
        shifts=tables.shifts,
        table_stride=tables.block_table.stride(0),
        PIECES=tile.pieces,
        BLOCK_M=tile.rows,
        SPLITS=splits,
        **_common(q, layer, masks),
    )
    if splits > 1:
        reduce_kernel[(rows, heads)](
            out,
            store_of(layer),
            top,
            total,
            acc,
            tables.seq_ids,
            tables.query_starts,
            q if sinks is None else sinks,
            L=layout_of(cache),
            HEADS=heads,
            SPLITS=splits,
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )


def _prefill(
    q: Tensor,
    layer: LayerCache,
    batch: AttentionBatch,
    tiles: Tensor,
    heads: HeadTile,
    masks: Masks | None,
    out: Tensor,
) -> None:
    """Writes the rows of the sequences of the tiles into out."""
    arrays = batch.arrays
    tile_kernel[(tiles.shape[0], layer.cache.num_kv_heads * heads.pieces)](
        q,
        out=out,
        tiles=tiles,
        query_starts=arrays.query_starts,
        block_table=arrays.block_table,
        seq_lens=arrays.seq_lens,
        shifts=arrays.shifts,
        table_stride=arrays.block_table.stride(0),
        PIECES=heads.pieces,
        BLOCK_M=heads.rows,
        **_common(q, layer, masks),
    )


def _with_rows(q: Tensor) -> Tensor:
    """The kernels take any strides but that of the head dim."""
    return q if q.stride(-1) == 1 else q.contiguous()


def _heads(q: Tensor, cache: KVCache, wanted: int) -> HeadTile:
    """A tile of about `wanted` rows. A latent key is so wide that no more fit."""
    group = q.shape[1] // cache.num_kv_heads
    rows = max(wanted, padded(group))
    if cache.shape.latent:
        rows = min(rows, LATENT_ROWS)
    return HeadTile(rows, max(1, rows // group), triton.cdiv(group, rows))


def _operands(q: Tensor, cache: KVCache) -> torch.dtype:
    """What tl.dot multiplies: numbers of the queries' dtype, unless a plain cache has more or other bits."""
    form = cache.format
    return q.dtype if not form.is_plain or form.dtype == q.dtype else torch.float32


def _query_rows(q: Tensor, cache: KVCache) -> int:
    """Half as many in fp32, whose tiles take twice the registers and shared memory, and a quarter where wide
    rows of them are decoded there."""
    if _operands(q, cache).itemsize == 2:
        return QUERY_ROWS
    is_wide = max(cache.shape.k_dim, cache.shape.v_dim) > 128
    return QUERY_ROWS // 4 if is_wide and not cache.format.is_plain else QUERY_ROWS // 2


def _common(q: Tensor, layer: LayerCache, masks: Masks | None) -> dict[str, Any]:
    """What both attention kernels are launched with, by name."""
    cache, softmax = layer.cache, layer.softmax
    layout, operands = layout_of(cache), _operands(q, cache)
    has_window = softmax.window is not None
    return {
        "store": store_of(layer),
        "masks": q if masks is None else masks.table,
        "sinks": q if softmax.sinks is None else softmax.sinks,
        **_scalars(softmax),
        "layer": layer.index,
        "q_stride_t": q.stride(0),
        "q_stride_h": q.stride(1),
        "L": layout,
        "GROUP": q.shape[1] // cache.num_kv_heads,
        "BLOCK_N": _tile_tokens((layout.BLOCK_D + layout.BLOCK_DV) * operands.itemsize, cache.format),
        "HAS_SOFTCAP": softmax.softcap is not None,
        "HAS_WINDOW": has_window,
        "HAS_POSITIONS": has_window and masks is not None and masks.has_positions,
        "HAS_EVICTED": masks is not None and masks.has_evicted,
        "HAS_SINKS": softmax.sinks is not None,
        "KEEP_16": keeps_16_bits(operands),
        "PRECISION": dot_precision(q.device),
        "num_warps": 4 if layout.BLOCK_DV <= 128 else 8,
        "num_stages": _stages(cache.format, operands.itemsize, max(layout.BLOCK_D, layout.BLOCK_DV)),
    }


def _scalars(softmax: Softmax) -> dict[str, Any]:
    """scale and cap with log2(e) in them: the kernels' exponentials are base 2."""
    if softmax.softcap is None:
        scale, cap = softmax.scale * LOG2_E, 0.0
    else:
        scale, cap = softmax.scale / softmax.softcap * LOG2_E, softmax.softcap * LOG2_E
    return {"scale": scale, "cap": cap, "window": softmax.window or 0}


def _tile_tokens(bytes_per_token: int, form: KVFormat) -> int:
    """Tokens of a tile of K and V, so that three stages of it fit in 96 KiB of shared memory; fewer where
    decoding takes many registers."""
    most = 32 if form.is_rotated or form.has_open_blocks else 64
    return max(16, min(most, 1 << (32768 // bytes_per_token).bit_length() - 1))


def _stages(form: KVFormat, itemsize: int, block_dims: int) -> int:
    """Tiles in flight: three, less where rows of fp32 leave no shared memory for them, or where look-ups of
    levels or rows of open blocks would be held there ahead of time."""
    if form.is_rotated:
        return 1
    if form.has_open_blocks:
        return 2 if itemsize == 2 and block_dims <= 128 else 1
    if itemsize == 2:
        return 3
    return 2 if block_dims <= 128 else 1
