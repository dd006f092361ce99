"""Cells as bytes: out of a cache and back, and tokens of any cells gathered into others.

A unit is the bytes of one cell (ops/cells.py), S slots of one (layer, KV head), plane after plane as the
back-end lays them out; good for caches of the same back-end, format and shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.backend import Backend
from kvreclaim.ops.cells import cell_view, head_tokens
from kvreclaim.ops.kv_cache import KVCache


def unit_bytes(cache: KVCache) -> int:
    """Bytes of one cell."""
    return sum(_row_bytes(plane) for plane in cell_view(cache).planes)


def read_units(cache: KVCache, cells: Tensor, out: Tensor) -> None:
    """Copy cells [n] int64 to out [n, unit_bytes] uint8 on the host."""
    start = 0
    for plane in cell_view(cache).planes:
        end = start + _row_bytes(plane)
        rows = plane[0].index_select(0, cells).contiguous()
        out[:, start:end] = rows.view(len(rows), -1).view(torch.uint8).to(out.device)
        start = end


def write_units(cache: KVCache, units: Tensor, cells: Tensor) -> None:
    """Copy units [n, unit_bytes] uint8 on the host to cells [n] int64; no cell twice."""
    start = 0
    for plane in cell_view(cache).planes:
        end = start + _row_bytes(plane)
        rows = units[:, start:end].contiguous().to(plane.device).view(plane.dtype)
        plane[0].index_copy_(0, cells, rows.view(len(rows), *plane.shape[2:]))
        start = end


def gather_units(backend: Backend, cache: KVCache, cells: Tensor, slots: Tensor, targets: Tensor) -> None:
    """Copy token i, at slots[i] of cells[i], to slot i of the target cells; coded formats keep their codes.

    cells, slots: [n * S] int64; targets: [n], none of them among the cells
    """
    own = torch.arange(len(cells), device=cells.device) * cache.block_size + slots
    backend.compact(cell_view(cache), own[None, None], cells, targets)


def unit_tokens(backend: Backend, cache: KVCache, cells: Tensor, layer_head: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, S, D] and values [n, S, Dv] in cells [n] int64, copies in the format's number; layer_head:
    [n, 2] int64, layer and head of each cell."""
    heads = (layer_head[:, 0] * cache.num_kv_heads + layer_head[:, 1]).to(cells.device)
    tokens = head_tokens(cache, 0, cells, len(cells) * cache.block_size, heads)
    k, v = backend.gather_tokens(tokens)
    size = cache.block_size
    return k[0].unflatten(0, (-1, size)), v[0].unflatten(0, (-1, size))


def _row_bytes(plane: Tensor) -> int:
    return plane.nbytes // plane.shape[1]
