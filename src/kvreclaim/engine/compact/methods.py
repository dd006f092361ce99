"""The eviction methods: which tokens a pass keeps, and where they move."""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.cell_pass import MAX_BYTES, CellPass
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.uneven import UnevenChoice, choose_uneven
from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.ops.cells import cell_view, head_tokens, natural_cells
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.ops.key_source import KeySource, PagedSource
from kvreclaim.ops.moving import to_device
from kvreclaim.ops.turning import turn_moved_keys
from kvreclaim.ops.working_memory import working_bytes


class TokenCompaction:
    """COMPACT: every head keeps equally many tokens, which move to the front of the new table. Keys are
    rotated to their new slots if slots are positions."""

    def __init__(self, context: PassContext) -> None:
        self.context = context
        self.rotations = [layer.rope for layer in context.facts.layers if layer.rope is not None]

    def choose(self, jobs: list[CompactionJob]) -> list[Tensor]:
        """[L | 1, K | 1, M] int64 kept slots of each."""
        return jobs[0].compressor.choose_all([self.context.question(job) for job in jobs])

    def apply(self, job: CompactionJob, choice: Tensor) -> CompactionResult:
        context = self.context
        source = context.index(job)
        target = to_device(np.array(job.plan.target_ids), source.device)
        context.backend.compact(context.cache, choice, source, target)
        if context.signals.scores is not None:
            context.signals.scores.compact(choice, source, target)
        if job.compressor.policy.cache_relative:
            turn_moved_keys(context.backend, context.cache, choice, target, self.rotations)
        context.moved(job, choice)
        return CompactionResult(choice)


class BlockEviction:
    """BLOCKS: evicts whole blocks, the same in all layers and heads; other tokens are not moved."""

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


class HeadCompaction:
    """CELLS: heads keep unequal numbers of tokens, in cells of the sequence's blocks, moved over the view of
    the cache in which a cell is a block.

    All heads' last cells fill up together (ops.cell_tables), so block table, physical length and slot mapping
    are those of any other sequence.
    """

    def __init__(self, context: PassContext) -> None:
        self.context = context
        self.view = cell_view(context.cache)

    @cached_property
    def max_cells(self) -> int:
        """Cells in flight at once, by the memory that is free at the first pass."""
        return working_bytes(self.context.cache.device, MAX_BYTES) // self.view.bytes_per_block

    def choose(self, jobs: list[CompactionJob]) -> list[tuple[UnevenChoice, HeadRows | None]]:
        """Choose the kept slots of every head, `budget` tokens on average; and their logical positions,
        int32, if the policy needs positions."""
        before = [self._heads(job) for job in jobs]
        positions = [
            self._positions(job, heads.tokens) if Signal.POSITIONS in job.compressor.policy.needs else None
            for job, heads in zip(jobs, before, strict=True)
        ]
        questions = [self._question(*each) for each in zip(jobs, before, positions, strict=True)]
        chosen = choose_uneven(jobs[0].compressor, questions, self.context.cache.block_size)
        return [
            (choice, None if known is None else known.take(choice.kept))
            for choice, known in zip(chosen, positions, strict=True)
        ]

    def _heads(self, job: CompactionJob) -> CellPass:
        cache, plan, held = self.context.cache, job.plan, job.seq.state.cells
        natural, blocks = partial(natural_cells, cache), np.array(plan.source_ids)
        return CellPass(cache, natural, held, blocks, plan.num_tokens, plan.prompt_slots)

    def _question(self, job: CompactionJob, heads: CellPass, positions: HeadRows | None) -> HeadsQuestion:
        context = self.context

        def of_head(layer: int, head: int, cells: Tensor, num_tokens: int) -> KeySource:
            return PagedSource(context.backend, head_tokens(context.cache, layer, cells, num_tokens, head))

        own: dict[str, HeadRows] = {} if positions is None else {"positions": positions}
        if Signal.TOKEN_SCORES in job.compressor.policy.needs:
            assert context.signals.scores is not None, "Signals.check has made them"
            own["token_scores"] = context.signals.scores.of_heads(heads.cells)
        return heads.question(context.question(job), of_head, own)

    def _positions(self, job: CompactionJob, tokens: np.ndarray) -> HeadRows:
        """int32 logical positions of the heads' tokens before the pass."""
        known, end, device = job.seq.state.head_positions, job.plan.logical_len, self.context.cache.device
        if known is None:
            known = HeadRows.empty(tokens.shape, torch.int32, device)
        new = tokens - known.counts
        most = int(new.max())
        return known.append(torch.arange(end - most, end, dtype=torch.int32, device=device), most - new, new)

    def apply(self, job: CompactionJob, choice: tuple[UnevenChoice, HeadRows | None]) -> CompactionResult:
        chosen, positions = choice
        state, targets = job.seq.state, np.array(job.plan.target_ids)
        state.cells = self._heads(job).move(chosen, targets, self._compact, self.max_cells)
        if positions is not None:
            state.head_positions = positions
        state.rounded += chosen.moved
        job.seq.cell_cache = None
        return CompactionResult(chosen.kept)

    def _compact(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        self.context.backend.compact(self.view, slots[None, None], sources, targets)
        if self.context.signals.scores is not None:
            self.context.signals.scores.compact_cells(slots, sources, targets)
