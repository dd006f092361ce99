"""kivi4's writes and moves over any layout of the codes: blocks are sealed by the write that fills them.

Tokens of a block that is not full lie in bf16 in its row (open_blocks.py). A write that fills the block
encodes it, keys by channel; from then on it never changes, so it can be shared and found by a prefix. A
compaction takes codes and parameters of values, and of keys that lie by token, as they are; other survivors
are encoded by token once, and those of a last block that stays partial go to a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvreclaim.kv_bytes import Geometry
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.formats import kivi_codec
from kvreclaim.ops.formats.affine import KEY_GRID, VALUE_GRID, Groups
from kvreclaim.ops.formats.kivi_codec import OPEN, Units
from kvreclaim.ops.formats.open_blocks import OpenBlocks
from kvreclaim.ops.kv_cache import KVCache, LayerCache


class UnitLayout(Protocol):
    """How a back-end lays out the bytes of units. Blocks: [n] int64 of this cache, all heads."""

    def load(self, layer: LayerCache, blocks: Tensor) -> Units:
        """The bytes of these blocks' units, [n, K, ...]; copies."""
        ...

    def store(self, layer: LayerCache, blocks: Tensor, units: Units) -> None:
        """Write units [n, K, ...]; no block twice."""
        ...

    def mark_open(self, layer: LayerCache, blocks: Tensor) -> None:
        """Set the state of these blocks' units to OPEN; no other byte changes."""
        ...


class RowLayout:
    """The reference's and Triton's: planes k [L, B, K, S, D / 2], v [L, B, K, S, Dv / 2] and
    params [L, B, K, U], all uint8."""

    def load(self, layer: LayerCache, blocks: Tensor) -> Units:
        k, v, params = (plane[blocks] for plane in layer.planes)
        return Units(k, v, params)

    def store(self, layer: LayerCache, blocks: Tensor, units: Units) -> None:
        for plane, part in zip(layer.planes, (units.k, units.v, units.params), strict=True):
            plane[blocks] = part

    def mark_open(self, layer: LayerCache, blocks: Tensor) -> None:
        layer.planes[2][blocks, :, geometry_of(layer.cache).state] = OPEN


ROWS = RowLayout()


@dataclass(frozen=True, slots=True, eq=False)
class OpenUnits:
    """Which of some units lie in rows. places: (i of the blocks, head) of each; at: (row, layer, head)."""

    places: tuple[Tensor, Tensor]
    at: tuple[Tensor, Tensor, Tensor]


def geometry_of(cache: KVCache) -> Geometry:
    return Geometry(cache.shape.k_dim, cache.shape.v_dim, cache.block_size)


def write(layer: LayerCache, k: Tensor, v: Tensor, slots: Tensor, layout: UnitLayout) -> None:
    """reference.write_kv: keys [T, K, D] and values [T, K, Dv] to slots [T], in the order of their blocks:
    a block's slots are written from the first on, in any number of writes. Numbers are rounded to bf16."""
    cache = layer.cache
    assert cache.origin is None, "tokens are written by block and layer, not by cell"
    rows = rows_of(cache)
    plan = rows.writes(slots)
    if cache.shape.latent:
        k = k[..., cache.shape.v_dim :]
    k, v = k.to(rows.k.dtype), v.to(rows.v.dtype)
    for store, numbers in ((rows.k, k), (rows.v, v)):
        store[:, layer.index][plan.rows, :, plan.offsets] = numbers[plan.tokens]
    if plan.opened.numel():
        layout.mark_open(layer, plan.opened)
    if plan.sealed.numel():
        full_k, full_v = (
            torch.cat((numbers[plan.whole].transpose(1, 2), store[plan.ended, layer.index]))
            for store, numbers in ((rows.k, k), (rows.v, v))
        )
        layout.store(layer, plan.sealed, kivi_codec.seal(full_k, full_v))


def copy_rows(cache: KVCache, pairs: list[tuple[int, int]], layout: UnitLayout) -> None:
    """Copy rows of blocks (source, target) that are not full; their bytes are not in the planes.

    The targets are open in every layer, whatever their sources are by now: a pass that failed may have sealed
    a source in some layers already.
    """
    targets = rows_of(cache).copy(pairs)
    for layer in cache.layers if targets.numel() else ():
        layout.mark_open(layer, targets)


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor, layout: UnitLayout) -> None:
    """reference.compact. Of a last target that is not full the tokens go to a row, in bf16."""
    size, num_kept = cache.block_size, kept.shape[-1]
    tail = num_kept % size
    assert not tail or cache.origin is None, f"{num_kept} tokens do not fill cells of {size} slots"
    targets = target_ids[: blocks_for(num_kept, size)]
    rows, full = rows_of(cache), num_kept // size
    row = None
    if cache.origin is None:
        ids = targets.tolist()
        row = rows.take(ids[full:], between_passes=True)
    for layer in cache.layers:
        slots = kept[layer.index if kept.shape[0] > 1 else 0].expand(cache.num_kv_heads, -1)
        moved = _survivors(layer, slots, source_ids, layout)
        if full:
            layout.store(layer, targets[:full], moved.units(full, size))
        if row:
            moved.to_row(rows, row[0], layer.index, full * size)
            layout.mark_open(layer, targets[full:])
    if cache.origin is None:
        rows.seal(ids[:full])


@dataclass(frozen=True, slots=True, eq=False)
class _Survivors:
    """Tokens [K, M, ...] of one layer in their new order: as numbers and as codes by token."""

    k: Tensor
    v: Tensor
    keys: Groups
    values: Groups

    def units(self, full: int, size: int) -> Units:
        """The first `full` blocks: [full, K, ...]."""
        keys, values = (
            Groups(
                *(
                    x[:, : full * size].unflatten(1, (full, size)).transpose(0, 1)
                    for x in (groups.n, groups.s, groups.z)
                )
            )
            for groups in (self.keys, self.values)
        )
        return kivi_codec.join(keys, values)

    def to_row(self, rows: OpenBlocks, row: int, layer: int, first: int) -> None:
        """The tokens from `first` on; what lies past them in the row becomes zero."""
        for store, numbers in ((rows.k, self.k), (rows.v, self.v)):
            tail = numbers[:, first:].to(store.dtype)
            store[row, layer] = 0
            store[row, layer, :, : tail.shape[1]] = tail


def _survivors(layer: LayerCache, slots: Tensor, source_ids: Tensor, layout: UnitLayout) -> _Survivors:
    """slots: [K, M] int64 of the old table."""
    cache, shape, size = layer.cache, layer.cache.shape, layer.cache.block_size
    units = layout.load(layer, source_ids)
    dims = shape.k_dim, shape.v_dim
    head = torch.arange(cache.num_kv_heads, device=slots.device)[:, None].expand_as(slots)
    unit = slots // size, head
    place = *unit, slots % size
    state = units.params[..., geometry_of(cache).state]
    k, v = decode(layer, source_ids, units)
    k, v = k[place], v[place]
    old_keys = kivi_codec.token_keys(units.k, units.params, *dims).take(place)
    old_values = kivi_codec.token_values(units.v, units.params, *dims).take(place)
    keys = old_keys.where((state == kivi_codec.BY_TOKEN)[unit], Groups.encode(k, KEY_GRID))
    values = Groups.encode(v, VALUE_GRID).where((state == OPEN)[unit], old_values)
    return _Survivors(k, v, keys, values)


def decode(layer: LayerCache, blocks: Tensor, units: Units) -> tuple[Tensor, Tensor]:
    """The numbers of loaded units [n, K, ...] of these blocks [n], open ones from their rows:
    keys [n, K, S, D] (the stored dims) and values [n, K, S, Dv], fp32."""
    cache = layer.cache
    dims = cache.shape.k_dim, cache.shape.v_dim
    k = kivi_codec.decode_keys(units.k, units.params, *dims)
    v = kivi_codec.decode_values(units.v, units.params, *dims)
    found = open_units(layer, blocks, units.params[..., geometry_of(cache).state])
    rows = rows_of(cache)
    k[found.places] = rows.k[found.at].float()
    v[found.places] = rows.v[found.at].float()
    return k, v


def open_units(layer: LayerCache, blocks: Tensor, state: Tensor) -> OpenUnits:
    """Units of blocks [n] with states [n, K] whose numbers lie in rows."""
    cache, origin = layer.cache, layer.cache.origin
    block, at_layer = blocks, torch.full_like(blocks, layer.index)
    if origin is not None:
        block = blocks // origin.num_kv_heads % origin.num_blocks
        at_layer = blocks // (origin.num_kv_heads * origin.num_blocks)
    row = rows_of(cache).row_of[block].long()
    i, head = ((state == OPEN) & (row >= 0)[:, None]).nonzero(as_tuple=True)
    at_head = head if origin is None else blocks[i] % origin.num_kv_heads
    return OpenUnits((i, head), (row[i], at_layer[i], at_head))


def rows_of(cache: KVCache) -> OpenBlocks:
    assert cache.open is not None, "a cache of kivi4 has rows for open blocks"
    return cache.open
