"""The block table of a sequence as kernels read it."""

from __future__ import annotations

import numpy as np

from kvreclaim.engine.request.request import Sequence
from kvreclaim.memory.manager import MemoryManager


def slots_are_positions(seq: Sequence) -> bool:
    """Whether a token's position is its slot, not its place in the text."""
    compressor = seq.request.compressor
    return compressor is not None and compressor.policy.cache_relative


def block_row(seq: Sequence, memory: MemoryManager) -> np.ndarray:
    """[blocks] int32 ids for the kernels; a hole names another block of the sequence (never attended)."""
    table = memory.table(seq.seq_id)
    if seq.row_cache is None or seq.row_cache[0] != table.version:
        some = next((block for block in reversed(table.block_ids) if block is not None), 0)
        ids = [some if block is None else block for block in table.block_ids]
        seq.row_cache = (table.version, np.array(ids, dtype=np.int32))
    return seq.row_cache[1]
