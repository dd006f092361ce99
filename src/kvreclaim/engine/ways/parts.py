"""A step whose sequences are not all attended alike: each part answers for its own rows of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression import Compressor
from kvreclaim.engine.core.request import Sequence
from kvreclaim.engine.core.scheduler import Scheduled
from kvreclaim.engine.ways.head_cells import head_cells, head_lengths
from kvreclaim.engine.ways.reads import DigestStore, SparseReads, reads_sparsely
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, BatchArrays
from kvreclaim.ops.cells import CellBatch, cell_batch, cell_layers
from kvreclaim.ops.kv_cache import KVCache, LayerCache


class Part(Protocol):
    """Some sequences of a step."""

    def attend(self, call: AttentionCall, out: Tensor) -> None:
        """Write their rows of out [T, H, Dv]; their keys and values are in the cache."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainPart:
    """Sequences with one block table for all layers and heads. rows: [t] int64, theirs in the step."""

    ops: Backend
    cache: KVCache
    batch: AttentionBatch
    rows: Tensor

    def attend(self, call: AttentionCall, out: Tensor) -> None:
        out[self.rows] = self.ops.paged_attention(
            call.q[self.rows], self.cache.layers[call.layer], self.batch
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeadPart:
    """Sequences with a table for each (layer, KV head): every KV head is a sequence of the cell view.

    cells:   the cell view as each layer attends over it
    rows:    [t] int64, theirs in the step
    order:   [t * K] int64, places of (row, KV head) by sequence, KV head and row; None: they lie so already
    batches: (layer, q [t, H, D]) -> the sequences' KV heads with their cells, in this order
    """

    ops: Backend
    cells: tuple[LayerCache, ...]
    rows: Tensor
    order: Tensor | None
    batches: Callable[[int, Tensor], CellBatch]

    def attend(self, call: AttentionCall, out: Tensor) -> None:
        layer = self.cells[call.layer]
        softmax = layer.softmax
        assert softmax.window is None, f"layer {call.layer}: window {softmax.window}, refused by check_policy"
        assert softmax.sinks is None, f"layer {call.layer}: attention sinks, which check_policy refuses"
        num_kv_heads = call.k.shape[1]
        rows = call.q[self.rows]
        q = rows.unflatten(1, (num_kv_heads, -1)).flatten(0, 1)
        found = self.ops.paged_attention(
            q if self.order is None else q[self.order],
            layer,
            self.batches(call.layer, rows),
        )
        if self.order is not None:
            sorted_found, found = found, torch.empty_like(found)
            found[self.order] = sorted_found
        out[self.rows] = found.view(len(self.rows), -1, found.shape[-1])


def rows_of(step: list[Scheduled], members: list[int], device: torch.device) -> Tensor:
    """[t] int64: the rows of these sequences in the step's flat token dim."""
    starts = np.cumsum([0, *(item.num_tokens for item in step)])
    rows = [np.arange(starts[i], starts[i + 1]) for i in members]
    return torch.from_numpy(np.concatenate(rows)).to(device)


def head_order(query_lens: list[int], num_kv_heads: int, device: torch.device) -> Tensor | None:
    """HeadPart.order for sequences with so many rows each."""
    if all(length == 1 for length in query_lens):
        return None
    starts = np.cumsum([0, *query_lens])
    heads = np.arange(num_kv_heads)[:, None]
    parts = [
        (np.arange(start, start + length)[None] * num_kv_heads + heads).ravel()
        for start, length in zip(starts, query_lens, strict=False)
    ]
    return torch.from_numpy(np.concatenate(parts)).to(device)


def uneven_part(
    items: list[Scheduled], rows: Tensor, memory: MemoryManager, cache: KVCache, ops: Backend
) -> HeadPart:
    """The part of sequences whose heads hold unequal numbers of tokens. What all layers need is made here,
    at once, and sent to the device together."""
    found = []
    for item in items:
        table = memory.table(item.seq.seq_id)
        lengths = head_lengths(item.seq, table.physical_len + item.num_tokens, cache)
        found.append((head_cells(item.seq, table, cache), lengths))
    width = max(cells.shape[-1] for cells, _ in found)
    tables = np.concatenate(
        [np.pad(cells, ((0, 0), (0, 0), (0, width - cells.shape[-1])), mode="edge") for cells, _ in found],
        axis=1,
    )
    lengths = np.concatenate([lengths for _, lengths in found], axis=1)
    heads, device = cache.num_kv_heads, cache.device
    query_lens = np.repeat([item.num_tokens for item in items], heads)
    starts = torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32)).to(device)
    sent = torch.from_numpy(tables).to(device), torch.from_numpy(lengths.astype(np.int32)).to(device)
    nothing = torch.zeros(lengths.shape[1], dtype=torch.int32, device=device)

    def batch(layer: int, _: Tensor) -> CellBatch:
        arrays = BatchArrays(
            block_table=sent[0][layer],
            query_starts=starts,
            seq_lens=sent[1][layer],
            shifts=nothing,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(lengths[layer].max()),
        )
        return cell_batch(tables[layer], lengths[layer], query_lens, arrays, cache.block_size)

    order = head_order([item.num_tokens for item in items], heads, device)
    return HeadPart(ops, cell_layers(cache), rows, order, batch)


def has_head_tables(seq: Sequence) -> bool:
    """Whether the sequence's heads do not share one block table."""
    return seq.state.cells is not None or reads_sparsely(seq)


def split(
    step: list[Scheduled],
    batch: AttentionBatch,
    memory: MemoryManager,
    cache: KVCache,
    ops: Backend,
    digests: DigestStore,
) -> tuple[Part, ...]:
    """The parts of a step; () if all its sequences have one table for all layers and heads."""
    if not any(has_head_tables(item.seq) for item in step):
        return ()
    members: dict[Compressor | bool, list[int]] = {}
    for i, item in enumerate(step):
        sparse = item.seq.request.compressor if reads_sparsely(item.seq) else None
        members.setdefault(sparse or item.seq.state.cells is not None, []).append(i)
    parts: list[Part] = []
    for kind, places in members.items():
        rows, items = rows_of(step, places, cache.device), [step[i] for i in places]
        if isinstance(kind, Compressor):
            reads = SparseReads(items, memory, cache, ops, digests)
            parts.append(HeadPart(ops, cell_layers(cache), rows, None, reads.batch))
        elif kind:
            parts.append(uneven_part(items, rows, memory, cache, ops))
        else:
            slots = tuple(batch.sequences[i] for i in places)
            own = AttentionBatch.build(slots, batch.block_size, cache.device)
            parts.append(PlainPart(ops, cache, own, rows))
    return tuple(parts)
