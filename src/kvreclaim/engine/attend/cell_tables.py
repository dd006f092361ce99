"""Block tables of sequences with unequal numbers of tokens per head."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.attend.parts import HeadPart, head_order
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import BatchArrays
from kvreclaim.ops.cell_tables import grown_cells, head_lengths
from kvreclaim.ops.cells import CellBatch, cell_batch, cell_layers, natural_cells
from kvreclaim.ops.kv_cache import KVCache


def head_cells(seq: Sequence, memory: MemoryManager, cache: KVCache) -> np.ndarray:
    """Return grown_cells of the sequence's current table, cached until the table changes."""
    table, natural = memory.table(seq.seq_id), partial(natural_cells, cache)
    if seq.cell_cache is None or seq.cell_cache[0] != table.version:
        seq.cell_cache = (table.version, grown_cells(seq.state.cells, seq.block_row(table), natural))
    return seq.cell_cache[1]


def uneven_part(
    items: list[Scheduled], rows: Tensor, memory: MemoryManager, cache: KVCache, ops: Backend
) -> HeadPart:
    """Return the part of sequences with unequal numbers of tokens per head. The tables of all layers are
    made here and device_arrays to the device together."""
    size, heads, device = cache.block_size, cache.num_kv_heads, cache.device
    cells = [head_cells(item.seq, memory, cache) for item in items]
    num_new = [item.row.first - item.seq.num_computed + item.num_tokens for item in items]
    physical = [
        memory.table(item.seq.seq_id).physical_len + new for item, new in zip(items, num_new, strict=True)
    ]
    lengths = np.concatenate(
        [head_lengths(item.seq.state.cells, n, cache) for item, n in zip(items, physical, strict=True)],
        axis=1,
    )
    tables = np.empty((*lengths.shape, max(own.shape[-1] for own in cells)), dtype=np.int32)
    for i, own in enumerate(cells):
        target = tables[:, i * heads : (i + 1) * heads]
        target[..., : own.shape[-1]] = own
        target[..., own.shape[-1] :] = own[..., -1:]
    query_lens = np.repeat([item.num_tokens for item in items], heads)
    starts = torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32)).to(device)
    device_arrays = torch.from_numpy(tables).to(device), torch.from_numpy(lengths.astype(np.int32)).to(device)
    no_shifts = torch.zeros(lengths.shape[1], dtype=torch.int32, device=device)
    longest, most_queries = lengths.max(axis=1).tolist(), int(query_lens.max())

    def batch(layer: int, _: Tensor) -> CellBatch:
        arrays = BatchArrays(
            block_table=device_arrays[0][layer],
            query_starts=starts,
            seq_lens=device_arrays[1][layer],
            shifts=no_shifts,
            max_query_len=most_queries,
            max_seq_len=longest[layer],
        )
        return cell_batch(tables[layer], lengths[layer], query_lens, arrays, size)

    order = head_order([item.num_tokens for item in items], heads, device)
    return HeadPart(ops, cell_layers(cache), rows, order, batch)
