"""Compressing one sequence: the choice, then blocks (integers), then bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression import Compressor
from kvreclaim.compression.compressor import LayerSource, SignalSource
from kvreclaim.engine.signals.signals import Signals, wants_positions
from kvreclaim.engine.ways.cells import UnevenPass
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_source import DenseSource, KeySource, PagedSource
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.turning import turn_moved_keys
from kvreclaim.schedule.plan import CompactionPlan, TableState, plan_compaction
from kvreclaim.schedule.way import Way

if TYPE_CHECKING:
    from kvreclaim.engine.core.outputs import EngineTotals
    from kvreclaim.engine.core.request import Sequence


@dataclass(frozen=True, slots=True)
class _Done:
    """A pass that happened: tokens and leading prompt slots left, and when the choice was made (seconds)."""

    num_kept: int
    prompt_slots: int
    scored_at: float


class _Context(TypedDict):
    """Keyword arguments of Compressor.choose."""

    positions: Tensor | None
    signals: SignalSource


class CompressionPass:
    """Compresses one sequence: signals -> score -> select -> plan -> shrink -> move bytes."""

    def __init__(
        self,
        memory: MemoryManager,
        cache: KVCache,
        backend: Backend,
        facts: ModelFacts,
        signals: Signals,
    ) -> None:
        self.memory = memory
        self.signals = signals
        self.backend = backend
        self.cache = cache
        self.uneven = UnevenPass(memory, cache, backend, signals)
        self.rotations = [layer.rope for layer in facts.layers if layer.rope is not None]
        self.tracks_positions = any(layer.softmax.window is not None for layer in facts.layers)

    def run(self, seq: Sequence, totals: EngineTotals) -> None:
        """Bring the sequence back to its budget, or postpone it whole when blocks are missing."""
        compressor, state = seq.request.compressor, seq.state
        assert compressor is not None, f"sequence {seq.seq_id} has no compression"
        num_live = seq.num_live
        prompt_slots = state.prompt_slots + max(
            0, min(seq.num_prompt, seq.num_computed) - min(seq.num_prompt, state.last_computed)
        )
        started = time.perf_counter()
        done = self._apply(seq, compressor, prompt_slots)
        if done is None:
            state.postponed += 1
            totals.compactions_postponed += 1
            return
        totals.score_s += done.scored_at - started
        totals.compact_s += time.perf_counter() - done.scored_at
        state.prompt_slots = done.prompt_slots
        state.last_computed = seq.num_computed
        state.num_evicted += num_live - done.num_kept
        perfect = self._blocks(num_live) - self._blocks(done.num_kept)
        state.blocks_perfect += perfect
        state.compactions += 1
        totals.blocks_perfect += perfect
        totals.tokens_evicted += num_live - done.num_kept
        totals.compactions += 1

    def _apply(self, seq: Sequence, compressor: Compressor, prompt_slots: int) -> _Done | None:
        """Choose and carry it out; None if blocks are missing and nothing has changed."""
        if compressor.way is Way.BLOCKS:
            return self._drop_blocks(seq, compressor, prompt_slots)
        plan = self._plan(seq, compressor.budget) if compressor.way is not Way.MASK else None
        if compressor.way is not Way.MASK and plan is None:
            return None
        if plan is not None and compressor.way is Way.CELLS:
            return self._compact_heads(seq, compressor, plan, prompt_slots)
        live = self._live_slots(seq)
        num_live = seq.num_live
        kept = compressor.choose(
            *self._question(seq, prompt_slots, live),
            **self._context(seq, live),
            first=seq.state.num_evicted == 0,
        )
        scored_at = time.perf_counter()
        if plan is not None:
            self._compact(seq, plan, kept)
        else:
            self._mask(seq, kept, live)
        return _Done(kept.shape[-1], compressor.kept_prompt_slots(num_live, prompt_slots), scored_at)

    def _drop_blocks(self, seq: Sequence, compressor: Compressor, prompt_slots: int) -> _Done:
        """Whole blocks go, the same in all layers and heads; what stays is not moved."""
        size = self.cache.block_size
        question = self._question(seq, prompt_slots, None)
        gone = compressor.choose_blocks(*question, size, **self._context(seq, None))
        scored_at = time.perf_counter()
        num_live = seq.num_live
        stays = torch.ones(num_live, dtype=torch.bool)
        for index in gone:
            stays[index * size : (index + 1) * size] = False
        kept = stays.nonzero()[None, None, :, 0].to(self.cache.device)
        positions = self._tracked_positions(seq)
        seq.state.blocks_freed += self.memory.drop_blocks(seq.seq_id, gone)
        self._moved(seq, kept, positions)
        return _Done(kept.shape[-1], int(stays[:prompt_slots].sum()), scored_at)

    def _compact_heads(
        self, seq: Sequence, compressor: Compressor, plan: CompactionPlan, new_prompt: int
    ) -> _Done:
        """Heads keep unequal numbers of tokens, compressor.budget on average."""
        choice = self.uneven.choose(seq, compressor, new_prompt)
        scored_at = time.perf_counter()
        seq.state.blocks_freed += self.uneven.compact(seq, plan, choice.kept, new_prompt)
        seq.state.rounded += choice.moved
        return _Done(plan.num_tokens, 0, scored_at)

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

    def _question(
        self, seq: Sequence, prompt_slots: int, live: Tensor | None
    ) -> tuple[LayerSource, int, int, int]:
        """What Compressor.choose is asked about: the live tokens, their number, how many are of the prompt,
        and the position of the next query."""
        table = self.memory.table(seq.seq_id)
        next_position = table.physical_len if slots_are_positions(seq) else seq.num_computed
        block_ids = self._index(seq)

        def layer_source(layer: int) -> KeySource:
            tokens = PagedTokens(self.cache.layers[layer], block_ids, table.physical_len)
            paged = PagedSource(self.backend, tokens)
            if live is None:
                return paged
            rows = live[layer][..., None]
            k, v = (x.take_along_dim(rows, 1) for x in paged.tensors())
            return DenseSource(k, v)

        return layer_source, seq.num_live, prompt_slots, next_position

    def _context(self, seq: Sequence, live: Tensor | None) -> _Context:
        """Positions, if a sliding window asks for them, and signals."""
        positions = self._positions(seq) if self._needs_positions(seq) else None
        if positions is not None and live is not None:
            positions = positions.take_along_dim(live, -1)
        return {"positions": positions, "signals": lambda layer: self.signals.of(seq, layer, live)}

    def _index(self, seq: Sequence) -> Tensor:
        return torch.from_numpy(block_row(seq, self.memory)).to(self.cache.device, torch.int64)

    def _positions(self, seq: Sequence) -> Tensor:
        """[L, K, physical] int32 logical position of every slot."""
        return torch.stack([self.signals.positions(seq, layer) for layer in range(self.cache.num_layers)])

    def _tracked_positions(self, seq: Sequence) -> Tensor | None:
        """The positions before a pass, where something will ask for those after it."""
        return self._positions(seq) if self._needs_positions(seq) or wants_positions(seq) else None

    def _needs_positions(self, seq: Sequence) -> bool:
        """Whether a sliding window goes by positions that slots do not tell."""
        return self.tracks_positions and not slots_are_positions(seq)

    def _compact(self, seq: Sequence, plan: CompactionPlan, kept: Tensor) -> None:
        """Take the planned blocks, slide the survivors into them, give the rest back."""
        source = self._index(seq)
        positions = self._tracked_positions(seq)
        shrunk = self.memory.shrink(plan)
        target = torch.tensor(shrunk.block_ids, device=source.device)
        self.backend.compact(self.cache, kept, source, target)
        if slots_are_positions(seq):
            turn_moved_keys(self.backend, self.cache, kept, target, self.rotations)
        self._moved(seq, kept, positions)
        seq.state.blocks_freed += shrunk.blocks_freed

    def _moved(self, seq: Sequence, kept: Tensor, positions: Tensor | None) -> None:
        """The kept slots [L | 1, K | 1, M] are slots 0 .. M - 1 now; their positions and signals follow."""
        if positions is not None:
            every_head = kept.expand(*positions.shape[:2], -1)
            seq.state.slot_positions = positions.take_along_dim(every_head, -1)
        self.signals.compacted(seq, kept)

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


def slots_are_positions(seq: Sequence) -> bool:
    """Whether a token's position is its slot, not its place in the text."""
    compressor = seq.request.compressor
    return compressor is not None and compressor.cache_relative


def block_row(seq: Sequence, memory: MemoryManager) -> np.ndarray:
    """[blocks] int32 ids for the kernels; a hole names another block of the sequence (never attended)."""
    table = memory.table(seq.seq_id)
    if seq.row_cache is None or seq.row_cache[0] != table.version:
        some = next((block for block in reversed(table.block_ids) if block is not None), 0)
        ids = [some if block is None else block for block in table.block_ids]
        seq.row_cache = (table.version, np.array(ids, dtype=np.int32))
    return seq.row_cache[1]
