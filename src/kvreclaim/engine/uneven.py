"""A pass over a sequence whose heads keep unequal numbers of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression import CompactionPlan, Compressor
from kvreclaim.compression.uneven import HeadLengths, Heads, UnevenChoice, choose_uneven
from kvreclaim.engine.cells import Cells, assign_cells, head_cells, head_lengths
from kvreclaim.engine.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.cells import cell_view, slots_of
from kvreclaim.ops.key_source import KeySource, PagedSource
from kvreclaim.ops.kv_cache import KVCache, PagedTokens

if TYPE_CHECKING:
    from kvreclaim.engine.request import Sequence


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
        before = seq.state.cells
        tokens = head_lengths(seq, table.physical_len, self.cache)
        old_prompt = 0 if before is None else before.prompt_slots
        lengths = HeadLengths(
            tokens, np.zeros_like(tokens) + old_prompt + new_prompt, seq.num_computed, before is None
        )
        blocks = torch.tensor(table.blocks(), device=self.cache.device)

        def source(layer: int, head: int | None) -> KeySource:
            if head is None:
                paged = PagedTokens(self.cache, layer, blocks, table.physical_len)
            else:
                paged = self._head_tokens(seq, layer, head, int(tokens[layer, head]))
            return PagedSource(self.backend, paged)

        return choose_uneven(
            compressor, source, lengths, self.cache.block_size, lambda layer: self.signals.of(seq, layer)
        )

    def compact(self, seq: Sequence, plan: CompactionPlan, kept: Heads, new_prompt: int) -> int:
        """Take the planned blocks, move each head's survivors into its cells of them, give the rest back.

        Each head is gathered whole before it is written. Returns: blocks freed.
        """
        size, state = self.cache.block_size, seq.state
        table = self.memory.table(seq.seq_id)
        tokens = head_lengths(seq, table.physical_len, self.cache)
        present, held = head_cells(seq, table, self.cache), -(-tokens // size)
        sources = {
            (layer, head): self._head_tokens(seq, layer, head, int(tokens[layer, head]))
            for layer, head in np.ndindex(*tokens.shape)
        }
        wanted = np.array([[len(slots) // size for slots in rows] for rows in kept])
        shrunk = self.memory.shrink(plan)
        targets = np.array(shrunk.block_ids)
        cells, order = assign_cells(present, held, wanted, targets, self.cache)
        for layer, head in order:
            slots = kept[layer][head]
            new = torch.from_numpy(cells[layer, head, : wanted[layer, head]].astype(np.int64))
            self._move(sources[layer, head], slots, slots_of(new.to(self.cache.device), size))
        old_prompt = 0 if state.cells is None else state.cells.prompt_slots
        state.cells = Cells(
            cells, wanted, len(targets), _prompt_left(kept, np.zeros_like(tokens) + old_prompt + new_prompt)
        )
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
        return PagedTokens(self.cells, 0, ids, num_tokens)

    def _move(self, source: PagedTokens, kept: Tensor, slots: Tensor) -> None:
        k, v = self.backend.gather_tokens(source)
        k, v = (x[0, kept][:, None].contiguous() for x in (k, v))
        self.backend.write_kv(self.cells, 0, k, v, slots)


def _prompt_left(kept: Heads, prompt_slots: np.ndarray) -> np.ndarray:
    """[L, K] how many kept slots lie in the prompt."""
    left = np.zeros_like(prompt_slots)
    for layer, head in np.ndindex(*prompt_slots.shape):
        left[layer, head] = int((kept[layer][head] < int(prompt_slots[layer, head])).sum())
    return left
