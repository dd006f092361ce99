"""COMPACT: every head keeps equally many tokens, which slide together into blocks of the new table."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.ops.moving import move
from kvreclaim.ops.turning import turn_moved_keys


class Compact:
    """Moves the kept slots to the front. Keys are rotated to their new slots if slots are positions."""

    def __init__(self, context: PassContext) -> None:
        self.context = context
        self.rotations = [layer.rope for layer in context.facts.layers if layer.rope is not None]

    def choose(self, jobs: list[CompactionJob]) -> list[Tensor]:
        """[L | 1, K | 1, M] int64 kept slots of each."""
        return jobs[0].compressor.choose_all([self.context.question(job) for job in jobs])

    def apply(self, job: CompactionJob, choice: Tensor) -> CompactionResult:
        context = self.context
        source = context.index(job)
        target = move(np.array(job.plan.target_ids), source.device)
        context.backend.compact(context.cache, choice, source, target)
        if context.signals.scores is not None:
            context.signals.scores.compact(choice, source, target)
        if job.compressor.policy.cache_relative:
            turn_moved_keys(context.backend, context.cache, choice, target, self.rotations)
        context.moved(job, choice)
        return CompactionResult(choice)
