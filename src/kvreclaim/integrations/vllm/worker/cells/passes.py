"""A pass after which heads hold unequal numbers of tokens: chosen over all layers, moved head by head.

The tokens of a last block that is not full stay in place. Only full blocks are distributed, so the host's
slots, lengths and block tables are those of any other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.cell_pass import MAX_BYTES, CellPass
from kvreclaim.compression.compressor import Compressor, PassQuestion
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.uneven import UnevenChoice
from kvreclaim.engine.signals.slot_scores import ScorePlanes
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables
from kvreclaim.integrations.vllm.worker.layouts import CacheViews, JoinedLayout
from kvreclaim.integrations.vllm.worker.staging import CacheSource, Stage
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.ops.key_source import KeySource
from kvreclaim.schedule.budget.compaction import Pass


@dataclass
class UnevenPasses:
    """Uneven passes of all requests on this worker.

    views:  the caches of all layers
    heads:  cells of each request's heads
    stage:  see layouts.CacheViews.source, for one head
    scores: of all slots, for policies that need them
    """

    views: CacheViews
    heads: HeadTables
    stage: Stage | None
    scores: ScorePlanes | None

    def __post_init__(self) -> None:
        self.grid = self.heads.grid
        if self.scores is not None:
            self.grid = replace(self.grid, layout=JoinedLayout(self.grid.layout, self.scores.cells))

    def open_slots(self, one: Pass[str]) -> int:
        """Count the tokens of the last block if it is not full; they stay."""
        return one.num_tokens % (self.grid.block_size * self.views.ratio)

    def question(
        self, one: Pass[str], compressor: Compressor, whole: PassQuestion, positions: HeadRows | None
    ) -> HeadsQuestion:
        """Return a compressor's input.

        whole:     all heads, without the open block
        positions: of all tokens, for policies that need them
        """
        grid, before = self.grid, self._before(one)

        def of_head(layer: int, head: int, cells: Tensor, num_tokens: int) -> KeySource:
            def read(part: int) -> Tensor:
                stored = grid.layout.gather(part, cells, num_tokens)
                return self.views.layers[layer].plain(stored, part, slice(head, head + 1))

            return CacheSource((1, num_tokens), grid.device, read, self.stage)

        own: dict[str, HeadRows] = {} if positions is None else {"positions": positions}
        if self.scores is not None and Signal.TOKEN_SCORES in compressor.policy.needs:
            own["token_scores"] = self.scores.of_heads(before.cells)
        return before.question(whole, of_head, own)

    def move(self, one: Pass[str], choice: UnevenChoice, all_slots: bool) -> HeadRows | None:
        """Carry out a choice. Returns: the kept slots of each head, ascending, if all_slots."""
        before, open_slots = self._before(one), self.open_slots(one)
        targets = self._as_backend(one.target_ids)[: (one.keep - open_slots) // self.grid.block_size]
        table = before.move(choice, targets, self._compact, MAX_BYTES // self.grid.cell_bytes)
        self.heads.put(one.seq_id, table)
        if not all_slots:
            return None
        slots = torch.arange(int(before.tokens.max()) + open_slots, device=self.grid.device)
        return choice.kept.append(slots, before.tokens, 0 * before.tokens + open_slots)

    def _before(self, one: Pass[str]) -> CellPass:
        num_tokens = one.num_tokens - self.open_slots(one)
        blocks = self._as_backend(one.source_ids)[: blocks_for(num_tokens, self.grid.block_size)]
        held = self.heads.held.get(one.seq_id)
        return CellPass(self.grid, self.grid.natural, held, blocks, num_tokens, one.prompt_slots)

    def _as_backend(self, blocks: Sequence[int]) -> np.ndarray:
        return (np.array(blocks)[:, None] * self.views.ratio + np.arange(self.views.ratio)).ravel()

    def _compact(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        self.grid.layout.compact(slots[None], sources, targets)
