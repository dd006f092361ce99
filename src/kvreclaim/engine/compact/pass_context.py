"""A compressor's view of a due sequence: its live tokens in their blocks, positions, signals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvreclaim.compression.compressor import PassQuestion
from kvreclaim.compression.policy import Signal
from kvreclaim.engine.compact.job import CompactionJob
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_source import KeySource, PagedSource
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.moving import to_device


@dataclass(frozen=True, slots=True, eq=False)
class PassContext:
    """State that every eviction method reads and changes."""

    memory: MemoryManager
    cache: KVCache
    backend: Backend
    facts: ModelFacts
    signals: Signals

    def index(self, job: CompactionJob) -> Tensor:
        """[blocks] int64 on the device: the table before the pass."""
        return to_device(np.array(job.plan.source_ids), self.cache.device)

    def question(self, job: CompactionJob) -> PassQuestion:
        """Return a compressor's inputs for the live tokens, with positions if a sliding window needs them."""
        block_ids = self.index(job)

        def source(layer: int) -> KeySource:
            tokens = PagedTokens(self.cache.layers[layer], block_ids, job.plan.num_tokens)
            return PagedSource(self.backend, tokens)

        def stack(layers: tuple[int, ...]) -> KeySource:
            tokens = PagedTokens.of_layers(self.cache, layers, block_ids, job.plan.num_tokens)
            return PagedSource(self.backend, tokens)

        signals = self.signals.of_pass(job.seq, job.plan.num_tokens, block_ids, source)
        positions = signals.positions if self._needs_positions(job) else None
        return PassQuestion(
            source,
            job.plan.num_tokens,
            job.plan.prompt_slots,
            job.next_position,
            positions,
            signals.of,
            job.plan.first,
            stack if self.backend.STACKS_LAYERS else None,
        )

    def moved(self, job: CompactionJob, kept: Tensor) -> None:
        """Move positions and signals of kept slots [L | 1, K | 1, M] to slots 0 .. M - 1."""
        if self._needs_positions(job) or Signal.POSITIONS in job.compressor.policy.needs:
            positions = self.positions(job)
            every_head = kept.expand(*positions.shape[:2], -1)
            job.seq.state.slot_positions = positions.take_along_dim(every_head, -1)
        self.signals.compacted(job.seq, kept)

    def _needs_positions(self, job: CompactionJob) -> bool:
        """Return whether a sliding window needs positions that do not follow from slots."""
        windows = any(layer.softmax.window is not None for layer in self.facts.layers)
        return windows and not job.compressor.policy.cache_relative

    def positions(self, job: CompactionJob) -> Tensor:
        """[L, K, slots] int32 logical position of every slot."""
        return self.signals.positions(job.seq, job.plan.num_tokens)
