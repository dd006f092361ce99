"""A step's sequences as layers with sliding windows see them: the tokens of the window, and no others."""

from __future__ import annotations

import numpy as np
import torch

from kvreclaim.engine.core.request import Scheduled, Sequence
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.groups import LayerGroups


def window_batches(
    step: list[Scheduled],
    groups: LayerGroups,
    memory: MemoryManager,
    block_size: int,
    device: torch.device,
) -> tuple[AttentionBatch, ...]:
    """One for each table of a window. Slots are counted from where a sequence's table begins: a window's mask
    is about differences of slots."""
    found = []
    for n, window in enumerate(groups.windows):
        ids = [_block_ids(item.seq, n, memory) for item in step]
        lengths = [
            memory.table(item.seq.seq_id).logical_len
            - memory.windows.tables(item.seq.seq_id)[n].first * block_size
            + item.num_tokens
            for item in step
        ]
        for group in range(window.num_blocks):
            rows = tuple(
                SequenceSlots(own[group], item.num_tokens, length)
                for item, own, length in zip(step, ids, lengths, strict=True)
            )
            found.append(AttentionBatch.build(rows, block_size, device))
    return tuple(found)


def _block_ids(seq: Sequence, n: int, memory: MemoryManager) -> np.ndarray:
    """[groups, blocks] int32 of a sequence's window n, remembered until its table changes."""
    table = memory.windows.tables(seq.seq_id)[n]
    known = seq.window_cache.get(n)
    if known is None or known[0] != table.version:
        ids = np.ascontiguousarray(np.array(table.rows, dtype=np.int32).T)
        known = seq.window_cache[n] = (table.version, ids)
    return known[1]
