"""Passes of sequences that are due together: all choose, then each is carried out, in their order."""

from __future__ import annotations

import time
from collections.abc import Sequence as ListLike
from typing import Any

from kvreclaim.compression import Compressor
from kvreclaim.engine.core.outputs import EngineTotals
from kvreclaim.engine.core.request import Sequence
from kvreclaim.engine.ways.blocks import Blocks
from kvreclaim.engine.ways.cells import UnevenPass
from kvreclaim.engine.ways.compact import Compact
from kvreclaim.engine.ways.job import Done, Job, WayOfPass
from kvreclaim.engine.ways.mask import Mask
from kvreclaim.engine.ways.pages import Pages, block_row
from kvreclaim.schedule.plan import TableState, plan_compaction
from kvreclaim.schedule.way import Way

Outcome = Done | Exception | None


class CompressionPass:
    """Plans, then groups by compressor and dispatches by way.

    Tables change first (integers), and so blocks of one sequence may become another's before their bytes have
    moved. Therefore every sequence chooses before anything moves, and moves follow the order of the plans.
    """

    def __init__(self, pages: Pages, totals: EngineTotals) -> None:
        self.pages = pages
        self.totals = totals
        self.ways: dict[Way, WayOfPass] = {
            Way.COMPACT: Compact(pages),
            Way.MASK: Mask(pages),
            Way.BLOCKS: Blocks(pages),
            Way.CELLS: UnevenPass(pages),
        }

    def run(self, due: ListLike[Sequence]) -> list[Outcome]:
        """Bring sequences back to their budgets.

        Returns: for each what was done; the error that ended its pass, after which its request must end; or
            None if it was postponed whole, because blocks are missing. One's error does not touch the others.
        """
        outcomes: dict[int, Outcome] = {}
        jobs: list[Job] = []
        for seq in due:
            job = _tried(self._plan, seq)
            if isinstance(job, Job):
                jobs.append(job)
            else:
                outcomes[seq.seq_id] = job
        started = time.perf_counter()
        choices = self._choose(jobs)
        scored = time.perf_counter()
        for job, choice in zip(jobs, choices, strict=True):
            done = choice if isinstance(choice, Exception) else _tried(self._apply, job, choice)
            outcomes[job.seq.seq_id] = done
        self.totals.score_s += scored - started
        self.totals.compact_s += time.perf_counter() - scored
        return [outcomes[seq.seq_id] for seq in due]

    def _choose(self, jobs: list[Job]) -> list[Any]:
        """What stays of each, or its error. Where those that share a compressor fail together, each is asked
        alone."""
        members: dict[Compressor, list[int]] = {}
        for i, job in enumerate(jobs):
            members.setdefault(job.compressor, []).append(i)
        found: dict[int, Any] = {}
        for compressor, places in members.items():
            choose = self.ways[compressor.way].choose
            together = _tried(choose, [jobs[i] for i in places])
            if isinstance(together, Exception):
                together = [_alone(_tried(choose, [jobs[i]])) for i in places]
            found.update(zip(places, together, strict=True))
        return [found[i] for i in range(len(jobs))]

    def _plan(self, seq: Sequence) -> Job | None:
        """The pass of a sequence, whose table becomes the new one; None if blocks are missing."""
        compressor, state, memory = seq.request.compressor, seq.state, self.pages.memory
        assert compressor is not None, f"sequence {seq.seq_id} has no compression"
        new_prompt = min(seq.num_prompt, seq.num_computed) - min(seq.num_prompt, state.last_computed)
        source = tuple(block_row(seq, memory).tolist())
        target: tuple[int, ...] = ()
        freed = 0
        if compressor.way in (Way.COMPACT, Way.CELLS):
            held, free = memory.table(seq.seq_id).block_ids, memory.pool.num_free
            table = TableState(held, memory.ref_counts(seq.seq_id), memory.indexed(seq.seq_id))
            plan = plan_compaction(seq.seq_id, table, compressor.budget, memory.block_size, num_free=free)
            if plan is None:
                state.postponed += 1
                self.totals.compactions_postponed += 1
                return None
            shrunk = memory.shrink(plan)
            target, freed = shrunk.block_ids, shrunk.blocks_freed
        return Job(
            seq=seq,
            compressor=compressor,
            source_ids=source,
            target_ids=target,
            num_tokens=seq.num_live,
            logical_len=seq.num_computed,
            prompt_slots=state.prompt_slots + max(0, new_prompt),
            first=state.num_evicted == 0,
            blocks_freed=freed,
        )

    def _apply(self, job: Job, choice: Any) -> Done:
        """Carry a choice out, give back what it frees, and note what has happened."""
        done = self.ways[job.compressor.way].apply(job, choice)
        seq, memory = job.seq, self.pages.memory
        freed = job.blocks_freed
        if job.compressor.way is Way.MASK:
            memory.mark_inexact(seq.seq_id)
            freed += memory.punch(seq.seq_id, done.gone) if done.gone else 0
        elif job.compressor.way is Way.BLOCKS:
            freed += memory.drop_blocks(seq.seq_id, done.gone)
        evicted, size = job.num_tokens - done.num_kept, memory.block_size
        perfect = -(-job.num_tokens // size) - -(-done.num_kept // size)
        state = seq.state
        state.prompt_slots, state.last_computed = done.prompt_slots, job.logical_len
        state.num_evicted += evicted
        state.blocks_freed += freed
        state.blocks_perfect += perfect
        state.compactions += 1
        self.totals.blocks_perfect += perfect
        self.totals.tokens_evicted += evicted
        self.totals.compactions += 1
        return done


def _tried(work: Any, *args: Any) -> Any:
    """What it returns, or the error."""
    try:
        return work(*args)
    except Exception as error:
        return error


def _alone(found: Any) -> Any:
    return found if isinstance(found, Exception) else found[0]
