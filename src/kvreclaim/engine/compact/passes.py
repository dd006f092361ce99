"""Passes of sequences that are due together: all choose, then all are applied in order."""

from __future__ import annotations

import time
from collections.abc import Sequence as ListLike

from kvreclaim.compression.compressor import Compressor, choose_together, tried
from kvreclaim.engine.compact.job import CompactionJob, CompactionResult, PassMethod
from kvreclaim.engine.compact.methods import BlockEviction, HeadCompaction, TokenCompaction
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.request.outputs import EngineTotals
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


class CompressionPass:
    """Groups planned passes by compressor and dispatches by eviction method.

    Block tables have already changed, so a block may belong to another sequence before its bytes have moved.
    Therefore every sequence chooses before anything moves, and moves follow the order of the plans.
    """

    def __init__(self, context: PassContext, totals: EngineTotals) -> None:
        self.context = context
        self.totals = totals
        self.methods: dict[EvictionMethod, PassMethod] = {
            EvictionMethod.COMPACT: TokenCompaction(context),
            EvictionMethod.BLOCKS: BlockEviction(context),
            EvictionMethod.CELLS: HeadCompaction(context),
        }

    def run(self, jobs: ListLike[CompactionJob]) -> list[CompactionResult | Exception]:
        """Carry out planned passes.

        Returns: for each its result, or the error that must end its request. An error does not affect other
            passes.
        """
        started = time.perf_counter()
        choices = choose_together(
            [job.compressor for job in jobs],
            lambda compressor, places: self._method(compressor).choose([jobs[i] for i in places]),
        )
        scored = time.perf_counter()
        outcomes: list[CompactionResult | Exception] = [
            choice
            if isinstance(choice, Exception)
            else tried(self._method(job.compressor).apply, job, choice)
            for job, choice in zip(jobs, choices, strict=True)
        ]
        for job in jobs:
            if job.compressor.policy.prompt_only:
                self.context.signals.drop(job.seq.seq_id)
        self.totals.score_s += scored - started
        self.totals.compact_s += time.perf_counter() - scored
        return outcomes

    def _method(self, compressor: Compressor) -> PassMethod:
        return self.methods[compressor.eviction_method]
