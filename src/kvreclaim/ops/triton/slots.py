"""Device functions: from a slot of a block table to its row in the cache.

A layer of the cache is row-major, k [B, K, S, D] and v [B, K, S, Dv], and is read as rows [B * K * S, D].
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_rows(table, slots, valid, head, KV_HEADS: tl.constexpr, S: tl.constexpr):
    """Row of each slot of one head in a layer viewed as [B * K * S, D]; int64, 0 where not valid."""
    block = tl.load(table + slots // S, mask=valid, other=0).to(tl.int64)
    return (block * KV_HEADS + head) * S + slots % S


@triton.jit
def stacked_rows(
    tables,
    num_blocks,
    slots,
    valid,
    head,
    KV_HEADS: tl.constexpr,
    S: tl.constexpr,
    STACKED: tl.constexpr,
):
    """slot_rows; STACKED: of one of n * K heads in n layers (PagedTokens), with tables [n, num_blocks]."""
    if STACKED:
        tables += head // KV_HEADS * num_blocks
        head = head % KV_HEADS
    return slot_rows(tables, slots, valid, head, KV_HEADS, S)


@triton.jit
def load_rows(x, rows, valid, D: tl.constexpr, BLOCK_D: tl.constexpr, AS_STORED: tl.constexpr):
    """[rows, BLOCK_D] of x [_, D], zero where not valid and past D; fp32 unless AS_STORED."""
    dims = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dims < D)[None, :]
    tile = tl.load(x + rows[:, None] * D + dims[None, :], mask=mask, other=0.0)
    if not AS_STORED:
        tile = tile.to(tl.float32)
    return tile
