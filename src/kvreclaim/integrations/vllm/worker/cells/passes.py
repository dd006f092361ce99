"""A pass after which heads hold unequal numbers of tokens: chosen over all layers, moved head by head.

The tokens of a last block that is not full stay in place. Only full blocks are distributed, so the host's
slots, lengths and block tables are those of any other request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import NO_SIGNALS, LayerSignals
from kvreclaim.compression.uneven import UnevenChoice, choose_uneven
from kvreclaim.integrations.vllm.worker.cells.grid import CellGrid
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables
from kvreclaim.integrations.vllm.worker.cells.positions import HeadPositions, Positions
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.integrations.vllm.worker.staging import CacheSource, Stage
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.cell_tables import CellMoves, CellTable, append_cells, assign_cells
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.ops.key_source import KeySource
from kvreclaim.ops.moving import move
from kvreclaim.schedule.budget.compaction import Pass

MAX_BYTES = 1 << 26
"""Keys and values that are in flight at once in a move (twice: as they lay and as they will)."""


class UnevenPasses:
    """Uneven passes of all requests on this worker.

    Args:
        views: the caches of all layers
        grid:  their cells
        heads: cells of each request's heads
        stage: see layouts.CacheViews.source; head_stage: the same for one head
    """

    def __init__(
        self,
        views: CacheViews,
        grid: CellGrid,
        heads: HeadTables,
        stage: Stage | None,
        head_stage: Stage | None,
    ) -> None:
        self.views, self.grid, self.heads = views, grid, heads
        self.stage, self.head_stage = stage, head_stage

    def carry_out(
        self,
        one: Pass[str],
        compressor: Compressor,
        positions: Positions | None,
        check: Callable[[Tensor], None],
        all_slots: bool,
    ) -> HeadRows | None:
        """Choose the kept slots, move them, and record their positions.

        positions: of the slots, for policies that need them
        check:     called with the scores to find a NaN
        all_slots: whether the result is used

        Returns: the kept slots of each head, ascending.
        """
        blocks = self.views.block_ids(one.source_ids)
        open_slots = one.num_tokens % (self.grid.block_size * self.views.ratio)
        full = one.num_tokens - open_slots
        held = self.heads.held.get(one.seq_id)
        request = self._question_of(compressor, one, full, blocks, held, positions)
        [choice] = choose_uneven(compressor, [request.question()], self.grid.block_size, check)
        num_targets = (one.keep - open_slots) // self.grid.block_size
        targets = np.concatenate([self._as_backend(block) for block in one.target_ids])[:num_targets]
        self.heads.put(one.seq_id, self._move(request, choice, targets))
        if not all_slots:
            return None
        slots = torch.arange(int(request.tokens.max()) + open_slots, device=self.grid.device)
        return choice.kept.append(slots, request.tokens, 0 * request.tokens + open_slots)

    def _question_of(self, compressor: Compressor, *args: Any) -> CellQuestion:
        return CellQuestion(self, *args)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or start anew."""
        self.heads.forget(request_ids)

    def _as_backend(self, block: int) -> np.ndarray:
        return block * self.views.ratio + np.arange(self.views.ratio)

    def _move(self, request: CellQuestion, choice: UnevenChoice, blocks: np.ndarray) -> CellTable:
        """Move the survivors. Heads are read whole before they are written, MAX_BYTES at a time."""
        size, kept = self.grid.block_size, choice.kept
        num_kept, num_held = kept.counts // size, request.tokens // size
        table, order = assign_cells(request.present, num_held, num_kept, self.grid.natural(blocks))
        moves = CellMoves(request.present, num_held, kept, table, order)
        for slots, sources, targets in moves.parts(size, MAX_BYTES // self.grid.cell_bytes):
            self.grid.layout.compact(slots[None], sources, targets)
        return CellTable(table, num_kept, len(blocks), choice.prompt_slots + request.prompt_tail)


class CellQuestion:
    """One request before a pass, without its open block.

    tokens:      [L, K] int64 of each head; present: [L, K, W] its cells
    prompt:      [L, K] leading slots that hold prompt tokens; prompt_tail: those of the open block, besides
    """

    def __init__(
        self,
        owner: UnevenPasses,
        one: Pass[str],
        full: int,
        blocks: Tensor,
        held: CellTable | None,
        positions: Positions | None,
    ) -> None:
        self.owner, self.one, self.full, self.blocks, self.held = owner, one, full, blocks, held
        grid = owner.grid
        count = blocks_for(full, grid.block_size)
        own = np.concatenate([owner._as_backend(block) for block in one.source_ids])[:count]
        if held is None:
            self.tokens = np.full(grid.shape, full)
            self.present = grid.natural(own)
        else:
            self.tokens = (held.counts - held.num_blocks) * grid.block_size + full
            self.present = append_cells(held, grid.natural(own[held.num_blocks :]))
        before = 0 if held is None else held.prompt_slots
        self.prompt = np.minimum(before + np.full(grid.shape, one.prompt_slots), self.tokens)
        self.prompt_tail = before + np.full(grid.shape, one.prompt_slots) - self.prompt
        self.cells = move(self.present.astype(np.int64), grid.device)
        self.known: HeadPositions | None = None
        if positions is not None:
            self.known = positions.of(one.seq_id, one.first, one.logical_len)
            assert self.known is not None, f"request {one.seq_id}: a pass was not seen"

    @cached_property
    def _signals(self) -> LayerSignals:
        """Signals of all heads, which hold the same tokens at the first pass; later each has its own."""
        if self.known is None or self.held is not None:
            return NO_SIGNALS
        return LayerSignals(
            positions=self._positions[0][0][: self.full].expand(self.owner.grid.num_heads, -1)
        )

    def question(self) -> HeadsQuestion:
        return HeadsQuestion(
            self._source,
            lambda _: self._signals,
            self.tokens,
            self.prompt,
            self.one.logical_len,
            self.held is None,
            self._own_signals,
        )

    def _source(self, layer: int, head: int | None) -> KeySource:
        owner = self.owner
        if head is None:
            return owner.views.source(layer, self.blocks, self.full, owner.stage)
        tokens = int(self.tokens[layer, head])
        own = self.cells[layer, head, : blocks_for(tokens, owner.grid.block_size)]

        def read(part: int) -> Tensor:
            stored = owner.grid.layout.gather(part, own, tokens)
            return owner.views.layers[layer].plain(stored, part, slice(head, head + 1))

        return CacheSource((1, tokens), owner.grid.device, read, owner.head_stage)

    def _own_signals(self, layer: int, head: int) -> Mapping[str, Tensor]:
        if self.known is None:
            return {}
        return {"positions": self._positions[layer][head][None, : int(self.tokens[layer, head])]}

    @cached_property
    def _positions(self) -> list[list[Tensor]]:
        """Positions of each head's tokens, the open block's last."""
        assert self.known is not None
        return list(self.known.at(self.one.logical_len))
