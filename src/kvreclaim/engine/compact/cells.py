"""CELLS: heads keep unequal numbers of tokens, in cells of the sequence's blocks.

All heads' last cells fill up together (ops.cell_tables), so block table, physical length and slot mapping are
those of any other sequence.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.compression.uneven import UnevenChoice, choose_uneven
from kvreclaim.engine.attend.cell_tables import grown_cells, head_lengths
from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.ops.cell_tables import CellMoves, CellTable, assign_cells
from kvreclaim.ops.cells import cell_view, head_tokens, natural_cells
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.ops.key_source import KeySource, PagedSource
from kvreclaim.ops.moving import move
from kvreclaim.ops.working_memory import working_bytes

MAX_BYTES = 1 << 26
"""Keys and values that are in flight at once in a compaction (twice: as they lay and as they will); more on a
GPU with much free memory."""


class UnevenPass:
    """Chooses for all heads and moves them, over the view of the cache in which a cell is a block."""

    def __init__(self, context: PassContext) -> None:
        self.context = context
        self.cells = cell_view(context.cache)

    @cached_property
    def max_cells(self) -> int:
        """Cells in flight at once, by the memory that is free at the first pass."""
        return working_bytes(self.context.cache.device, MAX_BYTES) // self.cells.bytes_per_block

    def choose(self, jobs: list[CompactionJob]) -> list[tuple[UnevenChoice, HeadRows | None]]:
        """The kept slots of every head, `budget` tokens on average; and their logical positions, int32, if
        the policy needs positions."""
        positions = [
            self._positions(job) if Signal.POSITIONS in job.compressor.policy.needs else None for job in jobs
        ]
        questions = [self._question(*each) for each in zip(jobs, positions, strict=True)]
        chosen = choose_uneven(jobs[0].compressor, questions, self.context.cache.block_size)
        return [
            (choice, None if before is None else before.take(choice.kept))
            for choice, before in zip(chosen, positions, strict=True)
        ]

    def _question(self, job: CompactionJob, positions: HeadRows | None) -> HeadsQuestion:
        context, size = self.context, self.context.cache.block_size
        tokens, present = self._lengths(job), self._present(job)
        held = -(-tokens // size)
        used = present[np.arange(present.shape[-1]) < held[..., None]]
        ids = HeadRows(move(used.astype(np.int64), context.cache.device), held)
        heads, needs = list(ids), job.compressor.policy.needs

        def source(layer: int, head: int | None) -> KeySource:
            if head is None:
                return whole.source(layer)
            own, num_tokens = heads[layer][head], int(tokens[layer, head])
            return PagedSource(context.backend, head_tokens(context.cache, layer, own, num_tokens, head))

        known: dict[str, list[list[Tensor]]] = {}
        if positions is not None:
            known["positions"] = list(positions)
        if Signal.TOKEN_SCORES in needs:
            assert context.signals.scores is not None, "Signals.check has made them"
            scores = context.signals.scores.of_cells(ids.flat, len(ids.flat) * size)[0]
            known["token_scores"] = list(HeadRows(scores, held * size))

        def own_signals(layer: int, head: int) -> dict[str, Tensor]:
            num_tokens = int(tokens[layer, head])
            return {name: rows[layer][head][None, :num_tokens] for name, rows in known.items()}

        first, whole = job.seq.state.cells is None, context.question(job)

        def signals(layer: int) -> LayerSignals:
            found = whole.signals(layer)
            if positions is None or not first:  # later each head has its own
                return found
            return replace(found, positions=positions.flat.view(*tokens.shape, -1)[layer])

        prompt_slots = _prompt_slots(job, tokens.shape)
        return HeadsQuestion(
            source, signals, tokens, prompt_slots, job.next_position, first, own_signals, whole.stack
        )

    def _lengths(self, job: CompactionJob) -> np.ndarray:
        """[L, K] int64 tokens of each head before the pass."""
        return head_lengths(job.seq.state.cells, job.plan.num_tokens, self.context.cache)

    def _present(self, job: CompactionJob) -> np.ndarray:
        """[L, K, W] the cells that hold them."""
        return grown_cells(job.seq.state.cells, np.array(job.plan.source_ids), self.context.cache)

    def _positions(self, job: CompactionJob) -> HeadRows:
        """int32 logical positions of the heads' tokens before the pass."""
        tokens, known, end = self._lengths(job), job.seq.state.head_positions, job.plan.logical_len
        device = self.context.cache.device
        if known is None:
            known = HeadRows.empty(tokens.shape, torch.int32, device)
        new = tokens - known.counts
        most = int(new.max())
        return known.append(torch.arange(end - most, end, dtype=torch.int32, device=device), most - new, new)

    def apply(self, job: CompactionJob, choice: tuple[UnevenChoice, HeadRows | None]) -> CompactionResult:
        """Move each head's survivors into its cells of the new table. Heads are gathered whole before they
        are written, about max_cells at a time."""
        chosen, positions = choice
        cache, state, kept = self.context.cache, job.seq.state, chosen.kept
        tokens, present = self._lengths(job), self._present(job)
        num_held, num_kept = -(-tokens // cache.block_size), kept.counts // cache.block_size
        cells, order = assign_cells(
            present, num_held, num_kept, natural_cells(cache, np.array(job.plan.target_ids))
        )
        moves = CellMoves(present, num_held, kept, cells, order)
        for slots, sources, targets in moves.parts(cache.block_size, self.max_cells):
            self.context.backend.compact(self.cells, slots[None, None], sources, targets)
            if self.context.signals.scores is not None:
                self.context.signals.scores.compact_cells(slots, sources, targets)
        if positions is not None:
            state.head_positions = positions
        state.cells = CellTable(cells, num_kept, len(job.plan.target_ids), chosen.prompt_slots)
        state.rounded += chosen.moved
        job.seq.cell_cache = None
        return CompactionResult(kept)


def _prompt_slots(job: CompactionJob, shape: tuple[int, ...]) -> np.ndarray:
    """[L, K] leading slots of each head that hold prompt tokens, before a pass."""
    cells = job.seq.state.cells
    return (
        np.full(shape, job.plan.prompt_slots) if cells is None else cells.prompt_slots + job.plan.prompt_slots
    )
