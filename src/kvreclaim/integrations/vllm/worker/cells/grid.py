"""The cells of the host's cache: a cell is one block of one KV head in one layer, S slots.

The host allocates all layers at once, so every cell is at a multiple of one unit from the first of them. As
blocks of a cache with one head, in steps of that unit, one table can address them for all layers and heads.
If a block of a head is contiguous, the unit is a cell. If heads alternate slot by slot, it is one slot of one
head, and blocks of the view overlap, which is harmless for reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.worker.layouts import CacheLayout, CacheViews, PackedLayout, StridedLayout

MAX_ENTRIES = 2**31 - 1
"""Tables are int32 in every back-end."""


@dataclass(frozen=True, slots=True, eq=False)
class CellGrid:
    """All cells of a cache as entries of block tables.

    first:        [L] int64, the entry of KV head 0 in block 0 of each layer; per_block, per_head: steps
    num_kv_heads: K
    block_size:   S
    view:         [entries, 1, S, 2D] of the cache, for attention
    layout:       the same, for reading and moving tokens
    """

    first: np.ndarray
    per_block: int
    per_head: int
    num_kv_heads: int
    block_size: int
    view: Tensor
    layout: CacheLayout

    @property
    def num_layers(self) -> int:
        return len(self.first)

    @property
    def device(self) -> torch.device:
        return self.view.device

    @property
    def shape(self) -> tuple[int, int]:
        """(L, K)."""
        return self.num_layers, self.num_kv_heads

    def natural(self, blocks: np.ndarray) -> np.ndarray:
        """[L, K, blocks] int32: the cells that every head has in these blocks, [blocks] int, counted as the
        back-end counts them."""
        heads = np.arange(self.num_kv_heads)[None, :, None] * self.per_head
        return (self.first[:, None, None] + heads + blocks.astype(np.int64) * self.per_block).astype(np.int32)

    @property
    def cell_bytes(self) -> int:
        """Bytes of the keys and values of one cell."""
        return self.view[0].numel() * self.view.element_size()


def find_grid(views: CacheViews) -> CellGrid:
    """The cells of these caches. Raises: UnsupportedModelError, saying why there are none."""
    caches = [layer.cache for layer in views.layers]
    strides = caches[0].stride()
    if any(cache.stride() != strides for cache in caches):
        raise UnsupportedModelError(f"layers have caches of several strides, {strides} among them")
    if len({cache.dtype for cache in caches}) != 1:
        raise UnsupportedModelError("layers have caches of several dtypes")
    if len({cache.untyped_storage().data_ptr() for cache in caches}) != 1:
        raise UnsupportedModelError("layers have caches in several allocations")
    offsets = [cache.storage_offset() for cache in caches]
    start = min(offsets)
    unit = math.gcd(*(offset - start for offset in offsets), strides[0], strides[1])
    first = np.array([(offset - start) // unit for offset in offsets], dtype=np.int64)
    blocks, heads, size, _ = caches[0].shape
    entries = int(first.max()) + (blocks - 1) * strides[0] // unit + (heads - 1) * strides[1] // unit + 1
    if entries > MAX_ENTRIES:
        raise UnsupportedModelError(f"{entries} cells are more than the {MAX_ENTRIES} that a table can name")
    lowest = offsets.index(start)
    return CellGrid(
        first,
        strides[0] // unit,
        strides[1] // unit,
        heads,
        size,
        _as_cells(caches[lowest], entries, unit),
        _cell_layout(views.layouts[lowest], entries, unit),
    )


def _as_cells(cache: Tensor, entries: int, unit: int) -> Tensor:
    """Return a view [B, K, ...] of the layer with the first cells as [entries, 1, ...]."""
    shape, strides = (entries, 1, *cache.shape[2:]), (unit, unit, *cache.stride()[2:])
    return cache.as_strided(shape, strides, cache.storage_offset())


def _cell_layout(layout: CacheLayout, entries: int, unit: int) -> CacheLayout:
    if isinstance(layout, StridedLayout):
        return StridedLayout(_as_cells(layout.keys, entries, unit), _as_cells(layout.values, entries, unit))
    assert isinstance(layout, PackedLayout), type(layout)
    return PackedLayout(_as_cells(layout.raw, entries, unit), layout.order)
