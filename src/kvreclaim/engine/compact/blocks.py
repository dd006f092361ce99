"""BLOCKS: whole blocks are evicted, the same in all layers and heads; the other tokens are not moved."""

from __future__ import annotations

import torch

from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.engine.compact.pass_context import PassContext


class Blocks:
    """A pass that evicts whole blocks: their scores decide which."""

    def __init__(self, context: PassContext) -> None:
        self.context = context

    def choose(self, jobs: list[CompactionJob]) -> list[list[int]]:
        """The table entries of each that go."""
        questions = [self.context.question(job) for job in jobs]
        return jobs[0].compressor.choose_blocks(questions, self.context.cache.block_size)

    def apply(self, job: CompactionJob, choice: list[int]) -> CompactionResult:
        context, size = self.context, self.context.cache.block_size
        stays = torch.ones(job.plan.num_tokens, dtype=torch.bool)
        for index in choice:
            stays[index * size : (index + 1) * size] = False
        kept = stays.nonzero()[None, None, :, 0].to(context.cache.device)
        context.moved(job, kept)
        return CompactionResult(kept, tuple(choice), int(stays[: job.plan.prompt_slots].sum()))
