"""A step's sequences for layers with windows: only the tokens of the window."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.windows import ChunkedWindow, Window
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.groups import LayerGroups


def window_slots(
    step: list[Scheduled], groups: LayerGroups, memory: MemoryManager
) -> list[tuple[SequenceSlots, ...]]:
    """Return the step's sequences for each table of a window. Slots are counted from the beginning of a
    sequence's table, because a window's mask depends on differences only. Each chunk is its own sequence."""
    found: list[tuple[SequenceSlots, ...]] = []
    for n, window in enumerate(groups.windows):
        parts = [part for item in step for part in window_parts(item, n, window, groups.parts, memory)]
        found += (
            tuple(SequenceSlots(ids[group], new, length) for ids, new, length in parts)
            for group in range(groups.num_groups(window))
        )
    return found


def window_batches(
    step: list[Scheduled], groups: LayerGroups, memory: MemoryManager, device: torch.device
) -> tuple[AttentionBatch, ...]:
    """Return window_slots as batches."""
    size = memory.block_size // groups.parts
    return tuple(AttentionBatch.build(rows, size, device) for rows in window_slots(step, groups, memory))


def window_parts(
    item: Scheduled, n: int, window: Window, parts: int, memory: MemoryManager
) -> Iterator[tuple[tuple[np.ndarray, ...], int, int]]:
    """Yield block ids per group of layers, new tokens and length of each part that attention takes."""
    ids, seq_id = _block_ids(item.seq, n, parts, memory), item.seq.seq_id
    first = memory.windows[n].table(seq_id).first * memory.block_size
    start = memory.table(seq_id).logical_len
    end = start + item.num_tokens
    while isinstance(window, ChunkedWindow) and (border := first + window.num_tokens) < end:
        num_blocks = window.num_tokens // memory.block_size * parts
        yield tuple(row[:num_blocks] for row in ids), border - start, window.num_tokens
        ids, first, start = tuple(row[num_blocks:] for row in ids), border, border
    yield ids, end - start, end - first


def _block_ids(seq: Sequence, n: int, parts: int, memory: MemoryManager) -> tuple[np.ndarray, ...]:
    """[blocks] int32 of each group of a sequence's window n, cached until its table changes."""
    table = memory.windows[n].table(seq.seq_id)
    known = seq.window_cache.get(n)
    if known is None or known[0] != table.version:
        rows = np.array(table.rows, dtype=np.int32).reshape(len(table.rows), -1, parts)
        ids = np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(rows.shape[1], -1)
        known = seq.window_cache[n] = (table.version, tuple(ids))
    return known[1]
