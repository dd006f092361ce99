"""K/V bytes on the move: into slots, between blocks, out in token order, together after an eviction."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.codes import PLAIN, load_real, load_tile
from kvreclaim.ops.triton.slots import load_rows, slot_rows, stacked_rows


@triton.jit
def _write_token(rows, cache, token, slot, L: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """A token of Rows into its slot in all heads."""
    element = tl.arange(0, BLOCK)
    head, dim = element // D, element % D
    mask = element < L.KV_HEADS * D
    value = tl.load(rows.x + token * rows.stride_t + head * rows.stride_h + dim, mask=mask, other=0.0)
    row = (slot // L.S * L.KV_HEADS + head) * L.S + slot % L.S
    tl.store(cache + row * D + dim, value, mask=mask)


@triton.jit
def write_kernel(k, v, store, slot_mapping, L: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr):
    """Rows of a plain format. Program (t, 0) stores the key of token t, (t, 1) its value; a negative slot is
    written nowhere."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        if tl.program_id(1) == 0:
            _write_token(k, store.k, token, slot, L, L.D, BLOCK)
        else:
            _write_token(v, store.v, token, slot, L, L.DV, BLOCK_V)


@triton.jit
def copy_kernel(cache, pairs, layer_stride, BLOCK_ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (pair, layer, part): a part of block pairs[pair, 0] to block pairs[pair, 1]."""
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair)
    target = tl.load(pairs + 2 * pair + 1)
    layer = cache + tl.program_id(1).to(tl.int64) * layer_stride
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = element < BLOCK_ELEMENTS
    value = tl.load(layer + source * BLOCK_ELEMENTS + element, mask=mask, other=0.0)
    tl.store(layer + target * BLOCK_ELEMENTS + element, value, mask=mask)


@triton.jit(do_not_specialize=["num_blocks", "num_tokens"])
def gather_kernel(
    store,
    out,
    block_ids,
    num_blocks,
    num_tokens,
    out_stride,
    L: tl.constexpr,
    STACKED: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (tile, head): BLOCK_N tokens of one head into out [K, T, out_stride], from its first column on:
    the stored dims of keys (SIDE 0) or values."""
    D: tl.constexpr = L.DV if SIDE else L.D
    BLOCK_D: tl.constexpr = L.BLOCK_DV if SIDE else L.BLOCK_D
    head = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = tokens < num_tokens
    rows = stacked_rows(block_ids, num_blocks, tokens, valid, head, L.KV_HEADS, L.S, STACKED)
    if L.K_FORMAT == PLAIN:
        tile = load_tile(store, rows, valid, L, SIDE, True)
    else:
        tile = load_real(store, rows, valid, L, SIDE)
    dims = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dims < D)[None, :]
    places = head.to(tl.int64) * num_tokens + tokens
    tl.store(out + places[:, None] * out_stride + dims[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=["num_kept", "num_slots", "kept_stride_l", "kept_stride_k"])
def compact_kernel(
    cache,
    room,
    kept,
    source_ids,
    target_ids,
    num_kept,
    num_slots,
    layer_stride,
    kept_stride_l,
    kept_stride_k,
    IS_READ: tl.constexpr,
    KV_HEADS: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (item, tile): BLOCK_N kept tokens of one head of one layer into room [items, slots, D], or from
    there to the slots of its target blocks; zeros behind the last one."""
    item = tl.program_id(0)
    head = item % KV_HEADS
    layer = (item // KV_HEADS).to(tl.int64)
    store = cache + layer * layer_stride
    own_room = room + item.to(tl.int64) * num_slots * D
    slots = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    valid = slots < num_kept
    if IS_READ:
        old = tl.load(kept + layer * kept_stride_l + head * kept_stride_k + slots, mask=valid, other=0)
        tile = load_rows(store, slot_rows(source_ids, old, valid, head, KV_HEADS, S), valid, D, BLOCK_D, True)
        mask = valid[:, None] & (dims < D)[None, :]
        tl.store(own_room + slots[:, None] * D + dims[None, :], tile, mask=mask)
    else:
        tile = load_rows(own_room, slots, valid, D, BLOCK_D, True)
        rows = slot_rows(target_ids, slots, slots < num_slots, head, KV_HEADS, S)
        mask = (slots < num_slots)[:, None] & (dims < D)[None, :]
        tl.store(store + rows[:, None] * D + dims[None, :], tile, mask=mask)
