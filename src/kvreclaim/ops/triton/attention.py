"""paged_attention and decode_attention: choose tiles and splits, launch the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.triton.attention_kernels import decode_kernel, reduce_kernel, tile_kernel
from kvreclaim.ops.triton.layout import KernelLayout, layout_of, rows_in, store_of
from kvreclaim.ops.triton.plan import (
    DecodeTables,
    Sequences,
    SlotPositions,
    decode_tables,
    query_tiles,
    sequences_of,
    slot_positions,
    tile_splits,
)
from kvreclaim.ops.triton.support import (
    dot_precision,
    keeps_16_bits,
    new_output,
    padded,
    shared_bytes,
)

LOG2_E = 1.4426950408889634
QUERY_ROWS = 64
"""Rows of a query tile: queries times the query heads of a KV head."""
DECODE_ROWS = 16
LATENT_ROWS = 16
HOPPER_BYTES = 200 << 10
"""Shared memory that a program may take on Hopper and later data center GPUs, at least."""
SHARES_AT_ONCE = 16
"""Shares that a step of the reduction takes."""


class Rule(NamedTuple):
    """A layer's Softmax, with log2(e) in scale and cap: the kernels' exponentials are base 2. sinks: anything
    where there are none."""

    sinks: Tensor
    scale: float
    cap: float
    window: int


class Parts(NamedTuple):
    """fp32, of each of n shares of queries: maximum and sum [n, H], values [n, H, Dv]."""

    top: Tensor
    total: Tensor
    acc: Tensor


class Variant(NamedTuple):
    """A compile-time argument: tiles of BLOCK_M rows (HeadTile) and BLOCK_N slots; a layer's options."""

    GROUP: int
    PIECES: int
    BLOCK_M: int
    BLOCK_N: int
    HAS_SOFTCAP: bool
    HAS_WINDOW: bool
    HAS_POSITIONS: bool
    NUM_SINKS: int
    KEEP_16: bool
    PRECISION: str


@dataclass(frozen=True, slots=True)
class HeadTile:
    """rows of a tile, the queries among them, and how many tiles the query heads of a KV head take."""

    rows: int
    queries: int
    pieces: int


def paged_attention(q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
    """ops.reference.paged_attention: sequences with one query are split over their keys, the others
    are cut into tiles of queries."""
    q, cache = _with_rows(q), layer.cache
    out = new_output(q, q.shape[0], q.shape[1], cache.v_head_dim)
    positions = slot_positions(batch)
    tables = decode_tables(batch, cache.num_kv_heads * _heads(q, cache, DECODE_ROWS).pieces)
    if tables is not None:
        _decode(q, layer, tables, positions, out)
    heads = _heads(q, cache, _query_rows(q, cache))
    tiles = query_tiles(batch, heads.queries)
    if tiles is not None:
        _prefill(q, layer, batch, tiles, heads, positions, out)
    return out.to(q.dtype)


def decode_attention(q: Tensor, layer: LayerCache, tables: DecodeTables) -> Tensor:
    """One query per sequence, everything about lengths read from the tables' tensors.

    Returns: [n, H, Dv], dtype of q [n, H, D]; zero rows for sequences of length 0. Mutates nothing.
    """
    q = _with_rows(q)
    out = new_output(q, q.shape[0], q.shape[1], layer.cache.v_head_dim)
    _decode(q, layer, tables, None, out)
    return out.to(q.dtype)


def _decode(
    q: Tensor, layer: LayerCache, tables: DecodeTables, positions: SlotPositions | None, out: Tensor
) -> None:
    """Writes the rows of tables.seq_ids into out."""
    tile, shares = _heads(q, layer.cache, DECODE_ROWS), tables.shares
    units = tables.seq_ids if shares is None else shares.units
    given: dict[str, Any] = {
        "store": store_of(layer),
        "out": out,
        "parts": _new_parts(q, 0 if shares is None else len(units), layer.cache),
        "seqs": tables.seqs,
        "rule": layer.cached("triton.rule", _rule),
        "L": layout_of(layer.cache),
        "A": _variant(q, layer, tile, positions),
    }
    grid = (len(units), layer.cache.num_kv_heads * tile.pieces)
    more = _of_a_call(q, layer, tables.seqs, tile) | {"IS_SPLIT": shares is not None}
    decode_kernel[grid](rows_in(q), units=units, **given, **more)
    if shares is not None:
        _reduce((len(tables.seq_ids), q.shape[1]), given, tables.seq_ids, shares.firsts)


def _prefill(
    q: Tensor,
    layer: LayerCache,
    batch: AttentionBatch,
    tiles: Tensor,
    heads: HeadTile,
    positions: SlotPositions | None,
    out: Tensor,
) -> None:
    """Writes the rows of the sequences of the tiles into out."""
    count, programs = tiles.shape[0], layer.cache.num_kv_heads * heads.pieces
    splits, rows = tile_splits(batch, count, programs), count * heads.queries
    given: dict[str, Any] = {
        "store": store_of(layer),
        "out": out,
        "parts": _new_parts(q, rows * splits if splits > 1 else 0, layer.cache),
        "seqs": sequences_of(batch),
        "rule": layer.cached("triton.rule", _rule),
        "L": layout_of(layer.cache),
        "A": _variant(q, layer, heads, positions),
    }
    more = _of_a_call(q, layer, given["seqs"], heads) | {"IS_SPLIT": splits > 1}
    tile_kernel[(count, programs, splits)](rows_in(q), tiles=tiles, **given, **more)
    if splits > 1:
        _reduce((rows, q.shape[1]), given, tiles, tiles, splits, heads.queries)


def _reduce(
    grid: tuple[int, int],
    given: dict[str, Any],
    tiles: Tensor,
    firsts: Tensor,
    splits: int = 0,
    queries: int = 0,
) -> None:
    more = {"QUERIES": queries, "BLOCK": SHARES_AT_ONCE, "num_warps": 4}
    reduce_kernel[grid](tiles=tiles, firsts=firsts, splits=splits, **given, **more)


def _new_parts(q: Tensor, units: int, cache: KVCache) -> Parts:
    """Room for so many shares of all heads."""
    shape = (units, q.shape[1])
    top, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    return Parts(top, total, torch.empty((*shape, cache.v_head_dim), dtype=torch.float32, device=q.device))


def _with_rows(q: Tensor) -> Tensor:
    """The kernels take any strides but that of the head dim."""
    return q if q.stride(-1) == 1 else q.contiguous()


def _heads(q: Tensor, cache: KVCache, num_rows: int) -> HeadTile:
    """A tile of about `num_rows` rows. A latent key is so wide that no more fit."""
    group = q.shape[1] // cache.num_kv_heads
    rows = max(num_rows, padded(group))
    if cache.shape.latent:
        rows = min(rows, LATENT_ROWS)
    return HeadTile(rows, max(1, rows // group), triton.cdiv(group, rows))


def _operands(q: Tensor, cache: KVCache) -> torch.dtype:
    """Dtype of tl.dot's operands: the queries' dtype, unless a plain cache has more or other bits."""
    form = cache.format
    return q.dtype if not form.is_plain or form.dtype == q.dtype else torch.float32


def _query_rows(q: Tensor, cache: KVCache) -> int:
    """Half as many in fp32, because tiles take twice the registers and shared memory, and a quarter of wide
    rows."""
    if _operands(q, cache).itemsize == 2:
        return QUERY_ROWS
    is_wide = max(cache.shape.k_dim, cache.shape.v_dim) > 128
    return QUERY_ROWS // 4 if is_wide else QUERY_ROWS // 2


def _rule(layer: LayerCache) -> Rule:
    softmax = layer.softmax
    if softmax.softcap is None:
        scale, cap = softmax.scale * LOG2_E, 0.0
    else:
        scale, cap = softmax.scale / softmax.softcap * LOG2_E, softmax.softcap * LOG2_E
    sinks = layer.planes[0] if softmax.sinks is None else softmax.sinks
    return Rule(sinks, scale, cap, softmax.window or 0)


def _variant(q: Tensor, layer: LayerCache, tile: HeadTile, positions: SlotPositions | None) -> Variant:
    cache, softmax = layer.cache, layer.softmax
    layout, operands = layout_of(cache), _operands(q, cache)
    has_window = softmax.window is not None
    return Variant(
        GROUP=q.shape[1] // cache.num_kv_heads,
        PIECES=tile.pieces,
        BLOCK_M=tile.rows,
        BLOCK_N=_tile_tokens(layout, operands.itemsize, cache, _decodes_codes(q, cache, tile)),
        HAS_SOFTCAP=softmax.softcap is not None,
        HAS_WINDOW=has_window,
        HAS_POSITIONS=has_window and positions is not None,
        NUM_SINKS=0 if softmax.sinks is None else len(softmax.sinks),
        KEEP_16=keeps_16_bits(operands),
        PRECISION=dot_precision(q.device),
    )


def _of_a_call(q: Tensor, layer: LayerCache, seqs: Sequences, tile: HeadTile) -> dict[str, int]:
    """Arguments that both attention kernels take, warps of a program and tiles in flight."""
    cache = layer.cache
    layout, decodes_codes = layout_of(cache), _decodes_codes(q, cache, tile)
    prefetches = decodes_codes and cache.format.name == "int4" and _is_hopper(cache)
    stages = _stages(cache.format, _operands(q, cache).itemsize, layout, prefetches)
    resources = {"num_warps": 4 if layout.BLOCK_DV <= 128 else 8, "num_stages": stages}
    stride = seqs.block_table.stride(0)
    return {"table_stride": stride, "layer": layer.index, **resources}


def _decodes_codes(q: Tensor, cache: KVCache, tile: HeadTile) -> bool:
    """Return whether few 16-bit queries meet codes of at most 128 dims: registers then suffice for more of
    them in flight."""
    few = tile.rows == DECODE_ROWS and _operands(q, cache).itemsize == 2
    return few and not cache.format.is_plain and max(cache.shape.k_dim, cache.shape.v_dim) <= 128


def _is_hopper(cache: KVCache) -> bool:
    """Return whether the device has the shared memory of Hopper and later."""
    return shared_bytes(cache.device) >= HOPPER_BYTES


def _tile_tokens(layout: KernelLayout, itemsize: int, cache: KVCache, decodes_codes: bool) -> int:
    """Tokens of a tile of K and V, so that three stages of it fit in 96 KiB of shared memory; fewer where
    decoding takes many registers. Tiles of int8 lie there as codes: from Hopper on, wider ones leave as many
    programs on a multiprocessor."""
    dims, most = layout.BLOCK_D + layout.BLOCK_DV, 32 if cache.format.is_rotated else 64
    if decodes_codes and cache.format.name == "int8" and dims == 256 and _is_hopper(cache):
        return 128
    return max(16, min(most, 1 << (32768 // (dims * itemsize)).bit_length() - 1))


def _stages(form: KVFormat, itemsize: int, layout: KernelLayout, prefetches: bool) -> int:
    """Tiles in flight: three, less where rows of fp32 leave no shared memory for them, or where look-ups of
    levels would be held there ahead of time. prefetches: two of a rotated format cost no program of a
    multiprocessor"""
    if form.is_rotated:
        return 2 if prefetches else 1
    if itemsize == 2:
        return 3
    return 2 if max(layout.BLOCK_D, layout.BLOCK_DV) <= 128 else 1
