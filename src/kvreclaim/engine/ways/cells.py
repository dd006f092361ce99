"""A pass over a sequence whose heads keep unequal numbers of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression import Compressor
from kvreclaim.compression.uneven import HeadLengths, Heads, UnevenChoice, choose_uneven
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.engine.ways.head_cells import Cells, assign_cells, head_cells, head_lengths
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.cells import cell_view
from kvreclaim.ops.key_source import KeySource, PagedSource
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.schedule.plan import CompactionPlan

if TYPE_CHECKING:
    from kvreclaim.engine.core.request import Sequence


MAX_BYTES = 1 << 26
"""Keys and values that are in flight at once in a compaction (twice: as they lay and as they will)."""


class UnevenPass:
    """Chooses and moves head by head, over the view of the cache in which a cell is a block."""

    def __init__(self, memory: MemoryManager, cache: KVCache, backend: Backend, signals: Signals) -> None:
        self.memory = memory
        self.cache = cache
        self.cells = cell_view(cache)
        self.backend = backend
        self.signals = signals

    def choose(self, seq: Sequence, compressor: Compressor, new_prompt: int) -> UnevenChoice:
        """The kept slots of every head; new_prompt: prompt tokens computed since the last pass."""
        table = self.memory.table(seq.seq_id)
        tokens = head_lengths(seq, table.physical_len, self.cache)
        prompt_slots, first = _prompt_slots(seq, tokens.shape, new_prompt), seq.state.cells is None
        lengths = HeadLengths(tokens, prompt_slots, seq.num_computed, first)
        blocks = torch.tensor(table.blocks(), device=self.cache.device)

        def source(layer: int, head: int | None) -> KeySource:
            if head is None:
                paged = PagedTokens(self.cache.layers[layer], blocks, table.physical_len)
            else:
                paged = self._head_tokens(seq, layer, head, int(tokens[layer, head]))
            return PagedSource(self.backend, paged)

        return choose_uneven(
            compressor, source, lengths, self.cache.block_size, lambda layer: self.signals.of(seq, layer)
        )

    def compact(self, seq: Sequence, plan: CompactionPlan, kept: Heads, new_prompt: int) -> int:
        """Take the planned blocks, move each head's survivors into its cells of them, give the rest back.

        Heads are gathered whole before they are written, a few at a time. Returns: blocks freed.
        """
        size, state = self.cache.block_size, seq.state
        table = self.memory.table(seq.seq_id)
        tokens = head_lengths(seq, table.physical_len, self.cache)
        present, held = head_cells(seq, table, self.cache), -(-tokens // size)
        wanted = np.array([[len(slots) // size for slots in rows] for rows in kept])
        shrunk = self.memory.shrink(plan)
        targets = np.array(shrunk.block_ids)
        cells, order = assign_cells(present, held, wanted, targets, self.cache)
        step = max(1, MAX_BYTES // (int(held.max()) * self.cells.bytes_per_block))
        for heads in (order[start : start + step] for start in range(0, len(order), step)):
            self._move(
                [present[at][: held[at]] for at in heads],
                [kept[layer][head] for layer, head in heads],
                [cells[at][: wanted[at]] for at in heads],
            )
        prompt_slots = _prompt_left(kept, _prompt_slots(seq, tokens.shape, new_prompt))
        state.cells = Cells(cells, wanted, len(targets), prompt_slots)
        seq.cell_cache = None
        if seq.request.compressor is not None and seq.request.compressor.prompt_only:
            self.signals.drop(seq.seq_id)
        return shrunk.blocks_freed

    def _head_tokens(self, seq: Sequence, layer: int, head: int, num_tokens: int) -> PagedTokens:
        """One head's tokens, as those of a sequence of the cell view."""
        table = self.memory.table(seq.seq_id)
        held = -(-num_tokens // self.cache.block_size)
        row = head_cells(seq, table, self.cache)[layer, head, :held]
        ids = torch.from_numpy(row.astype(np.int64)).to(self.cache.device)
        return PagedTokens(self.cells.layers[0], ids, num_tokens)

    def _move(self, source: list[np.ndarray], kept: list[Tensor], target: list[np.ndarray]) -> None:
        """Move several heads at once: the slots kept of each one's source cells fill its target cells."""
        device, size = self.cache.device, self.cache.block_size
        sources, targets = (
            torch.from_numpy(np.concatenate(cells).astype(np.int64)).to(device) for cells in (source, target)
        )
        firsts = np.cumsum([0, *(len(cells) * size for cells in source)]).tolist()
        slots = torch.cat([head + first for head, first in zip(kept, firsts, strict=False)])
        self.backend.compact(self.cells, slots[None, None], sources, targets)


def _prompt_slots(seq: Sequence, shape: tuple[int, ...], new_prompt: int) -> np.ndarray:
    """[L, K] leading slots of each head that hold prompt tokens, before a pass."""
    cells = seq.state.cells
    return np.full(shape, new_prompt) if cells is None else cells.prompt_slots + new_prompt


def _prompt_left(kept: Heads, prompt_slots: np.ndarray) -> np.ndarray:
    """[L, K] how many kept slots lie in the prompt."""
    left = np.zeros_like(prompt_slots)
    for layer, head in np.ndindex(*prompt_slots.shape):
        left[layer, head] = int((kept[layer][head] < int(prompt_slots[layer, head])).sum())
    return left
