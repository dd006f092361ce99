"""When a sequence is compressed, and applying the choice: blocks first (integers), then bytes.

The points at which a sequence is compressed depend on its own lengths alone, not on what else is in the
batch, unless a pass has to be postponed: then it lacks blocks because others hold shared ones in a full
pool. A preempted request that is computed again therefore makes the same choices again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression import CompactionPlan, Compressor, TableState, plan_compaction
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_source import DenseSource, KeySource, PagedSource
from kvreclaim.ops.kv_cache import KVCache, PagedTokens

if TYPE_CHECKING:
    from kvreclaim.engine.outputs import EngineTotals
    from kvreclaim.engine.request import Sequence


@dataclass(slots=True, eq=False)
class CompressionState:
    """What compression knows of one sequence between two passes.

    num_evicted:    tokens that each head no longer attends to (equal in every head)
    prompt_slots:   leading live slots that held prompt tokens after the last pass
    last_computed:  logical length at the last pass
    evicted:        [L, K, slots] bool, only where nothing moves (evict-only)
    slot_positions: [L, K, slots] int32 logical positions, only for models with sliding windows
    inherited_evicted: num_evicted at the fork, which the parent has counted already
    """

    num_evicted: int = 0
    prompt_slots: int = 0
    last_computed: int = 0
    evicted: Tensor | None = None
    slot_positions: Tensor | None = None
    blocks_freed: int = 0
    blocks_perfect: int = 0
    compactions: int = 0
    postponed: int = 0
    inherited_evicted: int = 0

    def fork(self) -> CompressionState:
        """The child's state: same tokens gone, its own counts from zero. Tensors are replaced, never
        written in place, so they are shared."""
        return replace(
            self,
            blocks_freed=0,
            blocks_perfect=0,
            compactions=0,
            postponed=0,
            inherited_evicted=self.num_evicted,
        )


def prompt_cap(compressor: Compressor, max_chunk: int) -> int:
    """Live tokens at which a sequence is compressed between two chunks of its prompt."""
    return compressor.budget + max(compressor.interval, max_chunk)


def decode_cap(compressor: Compressor) -> int:
    """Live tokens at which a sequence is compressed once its prompt is computed."""
    return compressor.budget + compressor.interval


def first_compaction(compressor: Compressor, num_prompt: int, max_chunk: int) -> int:
    """Logical length at which a sequence is compressed for the first time."""
    return min(prompt_cap(compressor, max_chunk), max(num_prompt, decode_cap(compressor)))


def tokens_until_compaction(seq: Sequence, max_chunk: int) -> int:
    """Most tokens that may be computed in one go before the next pass is considered."""
    compressor = seq.request.compressor
    if compressor is None or not compressor.evicts:
        return max_chunk
    if seq.num_computed < seq.num_prompt:
        room = prompt_cap(compressor, max_chunk) - seq.num_live
        return min(seq.num_prompt - seq.num_computed, max(1, room))
    return max(1, decode_cap(compressor) - seq.num_live)


def is_due(seq: Sequence, max_chunk: int) -> bool:
    """Whether the sequence is compressed at its present length."""
    compressor = seq.request.compressor
    if compressor is None or not compressor.evicts:
        return False
    if seq.num_computed < seq.num_prompt:
        return seq.num_live >= prompt_cap(compressor, max_chunk)
    return seq.num_live >= decode_cap(compressor)


class CompressionPass:
    """Compresses one sequence: signals -> score -> select -> plan -> shrink -> move bytes."""

    def __init__(self, memory: MemoryManager, cache: KVCache, backend: Backend, facts: ModelFacts) -> None:
        self.memory = memory
        self.backend = backend
        self.cache = cache
        self.tracks_positions = any(layer.sliding_window is not None for layer in facts.layers)

    def run(self, seq: Sequence, totals: EngineTotals) -> None:
        """Bring the sequence back to its budget, or postpone it whole when blocks are missing."""
        compressor, state = seq.request.compressor, seq.state
        assert compressor is not None, f"sequence {seq.seq_id} has no compression"
        plan = self._plan(seq, compressor.budget) if compressor.compacts else None
        if compressor.compacts and plan is None:
            state.postponed += 1
            totals.compactions_postponed += 1
            return
        started = time.perf_counter()
        num_live = seq.num_live
        prompt_slots = state.prompt_slots + max(
            0, min(seq.num_prompt, seq.num_computed) - min(seq.num_prompt, state.last_computed)
        )
        live = self._live_slots(seq)
        kept = self._choose(seq, compressor, live, prompt_slots)
        scored = time.perf_counter()
        if plan is not None:
            self._compact(seq, plan, kept)
        else:
            self._mask(seq, kept, live)
        totals.score_s += scored - started
        totals.compact_s += time.perf_counter() - scored
        num_kept = kept.shape[-1]
        state.prompt_slots = compressor.kept_prompt_slots(num_live, prompt_slots)
        state.last_computed = seq.num_computed
        state.num_evicted += num_live - num_kept
        state.blocks_perfect += self._blocks(num_live) - self._blocks(num_kept)
        state.compactions += 1
        totals.tokens_evicted += num_live - num_kept
        totals.compactions += 1

    def _plan(self, seq: Sequence, num_kept: int) -> CompactionPlan | None:
        memory = self.memory
        table = TableState(
            block_ids=memory.table(seq.seq_id).block_ids,
            ref_counts=memory.ref_counts(seq.seq_id),
            indexed=memory.indexed(seq.seq_id),
        )
        return plan_compaction(seq.seq_id, table, num_kept, memory.block_size, num_free=memory.pool.num_free)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.block_size)

    def _live_slots(self, seq: Sequence) -> Tensor | None:
        """[L, K, live] int64 slots still attended, where nothing was moved; else None: all slots."""
        mask = seq.state.evicted
        if mask is None:
            return None
        grown = self._grown_mask(seq)
        return (~grown).nonzero()[:, 2].view(*grown.shape[:2], -1)

    def _grown_mask(self, seq: Sequence) -> Tensor:
        """The eviction mask over all slots written so far: [L, K, physical]."""
        num_slots = self.memory.table(seq.seq_id).physical_len
        layers, heads = self.cache.num_layers, self.cache.num_kv_heads
        grown = torch.zeros((layers, heads, num_slots), dtype=torch.bool, device=self.cache.device)
        if seq.state.evicted is not None:
            grown[..., : seq.state.evicted.shape[-1]] = seq.state.evicted
        return grown

    def _choose(
        self, seq: Sequence, compressor: Compressor, live: Tensor | None, prompt_slots: int
    ) -> Tensor:
        """[L | 1, K | 1, budget] int64 indices into the live tokens."""
        table = self.memory.table(seq.seq_id)
        block_ids = self._index(seq)

        def layer_source(layer: int) -> KeySource:
            paged = PagedSource(self.backend, PagedTokens(self.cache, layer, block_ids, table.physical_len))
            if live is None:
                return paged
            rows = live[layer][..., None]
            k, v = (x.take_along_dim(rows, 1) for x in paged.tensors())
            return DenseSource(k, v)

        positions = self._positions(seq) if self.tracks_positions else None
        if positions is not None and live is not None:
            positions = positions.take_along_dim(live, -1)
        return compressor.choose(
            layer_source, seq.num_live, prompt_slots, seq.num_computed, positions=positions
        )

    def _index(self, seq: Sequence) -> Tensor:
        return torch.from_numpy(block_row(seq, self.memory)).to(self.cache.device, torch.int64)

    def _positions(self, seq: Sequence) -> Tensor:
        """[L, K, physical] int32 logical position of every slot."""
        table = self.memory.table(seq.seq_id)
        layers, heads = self.cache.num_layers, self.cache.num_kv_heads
        slots = torch.arange(table.physical_len, dtype=torch.int32, device=self.cache.device)
        positions = (slots + table.num_evicted).expand(layers, heads, -1).clone()
        if seq.state.slot_positions is not None:
            positions[..., : seq.state.slot_positions.shape[-1]] = seq.state.slot_positions
        return positions

    def _compact(self, seq: Sequence, plan: CompactionPlan, kept: Tensor) -> None:
        """Take the planned blocks, slide the survivors into them, give the rest back."""
        source = self._index(seq)
        positions = self._positions(seq) if self.tracks_positions else None
        shrunk = self.memory.shrink(plan)
        self.backend.compact(self.cache, kept, source, torch.tensor(shrunk.block_ids, device=source.device))
        if positions is not None:
            every_head = kept.expand(*positions.shape[:2], -1)
            seq.state.slot_positions = positions.take_along_dim(every_head, -1)
        seq.state.blocks_freed += shrunk.blocks_freed

    def _mask(self, seq: Sequence, kept: Tensor, live: Tensor | None) -> None:
        """Evict without moving: only a block that no head needs any more goes back."""
        grown = self._grown_mask(seq)
        layers, heads, num_slots = grown.shape
        every_head = kept.expand(layers, heads, -1)
        slots = every_head if live is None else live.take_along_dim(every_head, -1)
        mask = torch.ones_like(grown).scatter_(-1, slots, False)
        seq.state.evicted = mask
        full = num_slots // self.cache.block_size
        per_block = mask[..., : full * self.cache.block_size].view(layers, heads, full, self.cache.block_size)
        empty = per_block.all(-1).flatten(0, 1).all(0).nonzero().flatten().tolist()
        table = self.memory.table(seq.seq_id)
        self.memory.mark_inexact(seq.seq_id)
        holes = [index for index in empty if table.block_ids[index] is not None]
        if holes:
            seq.state.blocks_freed += self.memory.punch(seq.seq_id, holes)


def block_row(seq: Sequence, memory: MemoryManager) -> np.ndarray:
    """[blocks] int32 ids for the kernels; a hole names another block of the sequence (never attended)."""
    table = memory.table(seq.seq_id)
    if seq.row_cache is None or seq.row_cache[0] != table.version:
        some = next((block for block in reversed(table.block_ids) if block is not None), 0)
        ids = [some if block is None else block for block in table.block_ids]
        seq.row_cache = (table.version, np.array(ids, dtype=np.int32))
    return seq.row_cache[1]
