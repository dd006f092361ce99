"""Scores of tokens beside the slots of the host's cache, wherever its layers, blocks and heads lie."""

from __future__ import annotations

import torch

from kvreclaim.engine.signals.slot_scores import DTYPE, ScorePlanes
from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.cells.grid import CellGrid
from kvreclaim.integrations.vllm.layouts import CacheViews


def make_scores(views: CacheViews, grid: CellGrid | None) -> ScorePlanes:
    """Zeros for all slots. grid: of unequal heads, whose cells name the same scores.

    Raises: UnsupportedModelError if a slot of the cache is no whole number of equal units.
    """
    first = views.layers[0].cache
    if grid is None:
        planes = torch.zeros((len(views.layers), *first.shape[:3], 1), dtype=DTYPE, device=first.device)
        return ScorePlanes([planes[n] for n in range(len(planes))], planes.view(-1, 1, first.shape[2], 1))
    unit = first.shape[-1]
    if any(step % unit for step in (*first.stride()[:3], *_offsets(views))):
        raise UnsupportedModelError(
            f"kv_compression keeps a score beside each slot of {unit} numbers, and this cache has strides of "
            f"{first.stride()}, which are no multiples of that; take a policy with equal heads, or another "
            "--attention-backend."
        )
    blocks, heads, slots = (step // unit for step in first.stride()[:3])
    starts = [offset // unit for offset in _offsets(views)]
    last = max(starts) + sum(
        (n - 1) * step for n, step in zip(first.shape[:3], (blocks, heads, slots), strict=True)
    )
    flat = torch.zeros(last + 1, dtype=DTYPE, device=first.device)
    shape, strides = (*first.shape[:3], 1), (blocks, heads, slots, 1)
    cells = flat.as_strided((len(grid.view), 1, grid.block_size, 1), _cell_strides(grid, unit), 0)
    return ScorePlanes([flat.as_strided(shape, strides, start) for start in starts], cells)


def _offsets(views: CacheViews) -> list[int]:
    """Numbers from the first of all layers to each."""
    offsets = [int(layer.cache.storage_offset()) for layer in views.layers]
    return [offset - min(offsets) for offset in offsets]


def _cell_strides(grid: CellGrid, unit: int) -> tuple[int, int, int, int]:
    cell, head, slot, _ = (step // unit for step in grid.view.stride())
    return cell, head, slot, 1
