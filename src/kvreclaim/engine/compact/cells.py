"""CELLS: heads keep unequal numbers of tokens, in cells of the sequence's blocks.

All heads' last cells fill up together (ops.cell_tables), so block table, physical length and slot mapping are
those of any other sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.uneven import UnevenChoice, choose_uneven, prompt_left
from kvreclaim.engine.attend.cell_tables import grown_cells, head_lengths
from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.cell_tables import CellTable, assign_cells, join_moves
from kvreclaim.ops.cells import cell_view, head_tokens, natural_cells
from kvreclaim.ops.key_source import KeySource, PagedSource
from kvreclaim.ops.kv_cache import PagedTokens

MAX_BYTES = 1 << 26
"""Keys and values that are in flight at once in a compaction (twice: as they lay and as they will)."""


class UnevenPass:
    """Chooses and moves head by head, over the view of the cache in which a cell is a block."""

    def __init__(self, context: PassContext) -> None:
        self.context = context
        self.cells = cell_view(context.cache)

    def choose(self, jobs: list[CompactionJob]) -> list[UnevenChoice]:
        """The kept slots of every head, `budget` tokens on average."""
        questions = [self._question(job) for job in jobs]
        return choose_uneven(jobs[0].compressor, questions, self.context.cache.block_size)

    def _question(self, job: CompactionJob) -> HeadsQuestion:
        context, cells = self.context, job.seq.state.cells
        tokens = head_lengths(cells, job.plan.num_tokens, context.cache)
        blocks, present = context.index(job), grown_cells(cells, np.array(job.plan.source_ids), context.cache)
        ids = torch.from_numpy(present.astype(np.int64)).to(context.cache.device)

        def source(layer: int, head: int | None) -> KeySource:
            if head is None:
                whole = PagedTokens(context.cache.layers[layer], blocks, job.plan.num_tokens)
                return PagedSource(context.backend, whole)
            num_tokens = int(tokens[layer, head])
            own = ids[layer, head, : blocks_for(num_tokens, context.cache.block_size)]
            held = head_tokens(context.cache, layer, own, num_tokens, torch.full_like(own, head))
            return PagedSource(context.backend, held)

        positions, needs = self._positions(job, tokens), job.compressor.policy.needs

        def own_signals(layer: int, head: int) -> dict[str, Tensor]:
            found = {"positions": positions(layer, head)[None]} if Signal.POSITIONS in needs else {}
            if Signal.TOKEN_SCORES in needs:
                assert context.signals.scores is not None, "Signals.check has made them"
                num_tokens = int(tokens[layer, head])
                own = ids[layer, head, : blocks_for(num_tokens, context.cache.block_size)]
                found["token_scores"] = context.signals.scores.of_cells(own, num_tokens)
            return found

        prompt_slots, signals = _prompt_slots(job, tokens.shape), context.question(job).signals
        return HeadsQuestion(
            source,
            signals,
            tokens,
            prompt_slots,
            job.next_position,
            cells is None,
            own_signals,
        )

    def _positions(self, job: CompactionJob, tokens: np.ndarray) -> Callable[[int, int], Tensor]:
        """(layer, head) -> [T] int32 logical positions of the head's tokens [L, K]."""
        known, end, device = job.seq.state.head_positions, job.plan.logical_len, self.context.cache.device

        def of(layer: int, head: int) -> Tensor:
            left = (
                known[layer][head] if known is not None else torch.empty(0, dtype=torch.int32, device=device)
            )
            first = end - (int(tokens[layer, head]) - len(left))
            return torch.cat([left, torch.arange(first, end, dtype=torch.int32, device=device)])

        return of

    def apply(self, job: CompactionJob, choice: UnevenChoice) -> CompactionResult:
        """Move each head's survivors into its cells of the new table. Heads are gathered whole before they
        are written, a few at a time."""
        cache, state, kept = self.context.cache, job.seq.state, choice.kept
        tokens = head_lengths(state.cells, job.plan.num_tokens, cache)
        present = grown_cells(state.cells, np.array(job.plan.source_ids), cache)
        held = -(-tokens // cache.block_size)
        wanted = np.array([[len(slots) // cache.block_size for slots in rows] for rows in kept])
        cells, order = assign_cells(
            present, held, wanted, natural_cells(cache, np.array(job.plan.target_ids))
        )
        step = max(1, MAX_BYTES // (int(held.max()) * self.cells.bytes_per_block))
        for heads in (order[start : start + step] for start in range(0, len(order), step)):
            self._move(
                [present[at][: held[at]] for at in heads],
                [kept[layer][head] for layer, head in heads],
                [cells[at][: wanted[at]] for at in heads],
            )
        prompt_slots = prompt_left(kept, _prompt_slots(job, tokens.shape))
        state.cells = CellTable(cells, wanted, len(job.plan.target_ids), prompt_slots)
        if Signal.POSITIONS in job.compressor.policy.needs:
            of = self._positions(job, tokens)
            state.head_positions = [
                [of(layer, head)[slots] for head, slots in enumerate(rows)] for layer, rows in enumerate(kept)
            ]
        state.rounded += choice.moved
        job.seq.cell_cache = None
        return CompactionResult(kept)

    def _move(self, source: list[np.ndarray], kept: list[Tensor], target: list[np.ndarray]) -> None:
        """Move several heads at once: the slots kept of each one's source cells fill its target cells."""
        slots, sources, targets = join_moves(source, kept, target, self.context.cache.block_size)
        self.context.backend.compact(self.cells, slots[None, None], sources, targets)
        if self.context.signals.scores is not None:
            self.context.signals.scores.compact_cells(slots, sources, targets)


def _prompt_slots(job: CompactionJob, shape: tuple[int, ...]) -> np.ndarray:
    """[L, K] leading slots of each head that hold prompt tokens, before a pass."""
    cells = job.seq.state.cells
    return (
        np.full(shape, job.plan.prompt_slots) if cells is None else cells.prompt_slots + job.plan.prompt_slots
    )
