"""COMPACT: every head keeps equally many tokens, which slide together into blocks of the new table."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.engine.compact.pages import Pages
from kvreclaim.ops.turning import turn_moved_keys


class Compact:
    """Chosen slots move to the front; keys whose position is their slot turn when they do."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.rotations = [layer.rope for layer in pages.facts.layers if layer.rope is not None]

    def choose(self, jobs: list[CompactionJob]) -> list[Tensor]:
        """[L | 1, K | 1, M] int64 kept slots of each."""
        return jobs[0].compressor.choose_all([self.pages.question(job) for job in jobs])

    def apply(self, job: CompactionJob, choice: Tensor) -> CompactionResult:
        pages = self.pages
        source = pages.index(job)
        target = torch.tensor(job.plan.target_ids, device=source.device)
        pages.backend.compact(pages.cache, choice, source, target)
        if pages.signals.scores is not None:
            pages.signals.scores.compact(choice, source, target)
        if job.compressor.policy.cache_relative:
            turn_moved_keys(pages.backend, pages.cache, choice, target, self.rotations)
        pages.moved(job, choice)
        return CompactionResult(choice)
