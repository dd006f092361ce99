"""MASK: evicted tokens are masked and nothing moves; a block goes back when no head needs it any more."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.engine.compact.pass_context import PassContext


class Mask:
    """Evicts in place."""

    def __init__(self, context: PassContext) -> None:
        self.context = context

    def choose(self, jobs: list[CompactionJob]) -> list[Tensor]:
        """[L | 1, K | 1, M] int64 of each: which of its live slots stay."""
        questions = [self.context.question(job, self._live_slots(job)) for job in jobs]
        return jobs[0].compressor.choose_all(questions)

    def apply(self, job: CompactionJob, choice: Tensor) -> CompactionResult:
        size = self.context.cache.block_size
        live, mask = self._live_slots(job), self._grown_mask(job)
        layers, heads, num_slots = mask.shape
        every_head = choice.expand(layers, heads, -1)
        slots = every_head if live is None else live.take_along_dim(every_head, -1)
        mask = torch.ones_like(mask).scatter_(-1, slots, False)
        job.seq.state.evicted = mask
        held = self.context.memory.table(job.seq.seq_id).block_ids
        full = num_slots // size
        per_block = mask[..., : full * size].view(layers, heads, full, size)
        empty = per_block.all(-1).flatten(0, 1).all(0).nonzero().flatten().tolist()
        gone = tuple(index for index in empty if held[index] is not None)
        return CompactionResult(choice, gone)

    def _live_slots(self, job: CompactionJob) -> Tensor | None:
        """[L, K, live] int64 slots still attended; None: all of them, nothing has been evicted."""
        if job.seq.state.evicted is None:
            return None
        mask = self._grown_mask(job)
        return (~mask).nonzero()[:, 2].view(*mask.shape[:2], -1)

    def _grown_mask(self, job: CompactionJob) -> Tensor:
        """The eviction mask over all slots written so far: [L, K, slots]."""
        cache, evicted = self.context.cache, job.seq.state.evicted
        shape = (cache.num_layers, cache.num_kv_heads, job.num_slots)
        grown = torch.zeros(shape, dtype=torch.bool, device=cache.device)
        if evicted is not None:
            grown[..., : evicted.shape[-1]] = evicted
        return grown
