"""A pass after which heads hold unequal numbers of tokens, over any cache in which a cell is a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from torch import Tensor

from kvreclaim.compression.compressor import PassQuestion
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import LayerSignals
from kvreclaim.compression.uneven import UnevenChoice
from kvreclaim.ops.cell_tables import (
    CellMoves,
    CellShape,
    CellTable,
    NaturalCells,
    assign_cells,
    grown_cells,
    head_lengths,
)
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.ops.key_source import KeySource
from kvreclaim.ops.moving import to_device

MAX_BYTES = 1 << 26
"""Keys and values that are in flight at once in a move (twice: as they lay and as they will)."""

HeadReader = Callable[[int, int, Tensor, int], KeySource]
"""(layer, head, its cells [n] int64, its tokens) -> keys and values."""


class CellPass:
    """One sequence before such a pass.

    Args:
        cache:        its sizes; natural: the cells of every head in some blocks
        held:         cells after the last pass; None before the first
        blocks:       [n] int, the block table with the blocks appended since
        num_tokens:   live tokens, on average over the heads
        prompt_slots: leading slots that hold prompt tokens, of those since the last pass

    tokens:       [L, K] int64 of each head; present: [L, K, W] its cells in token order
    prompt_slots: [L, K] leading slots of each head that hold prompt tokens
    """

    def __init__(
        self,
        cache: CellShape,
        natural: NaturalCells,
        held: CellTable | None,
        blocks: np.ndarray,
        num_tokens: int,
        prompt_slots: int,
    ) -> None:
        self.cache, self._natural = cache, natural
        self.first = held is None
        self.tokens = head_lengths(held, num_tokens, cache)
        self.present = grown_cells(held, blocks, natural)
        self.num_cells = -(-self.tokens // cache.block_size)
        num_prompt = np.full_like(self.tokens, prompt_slots) + (0 if held is None else held.prompt_slots)
        self.prompt_slots = np.minimum(num_prompt, self.tokens)
        self._later_prompt = num_prompt - self.prompt_slots

    @cached_property
    def cells(self) -> HeadRows:
        """Cells of each head in token order, int64, on the device."""
        used = self.present[np.arange(self.present.shape[-1]) < self.num_cells[..., None]]
        return HeadRows(to_device(used.astype(np.int64), self.cache.device), self.num_cells)

    def question(
        self, whole: PassQuestion, of_head: HeadReader, own: Mapping[str, HeadRows]
    ) -> HeadsQuestion:
        """Return a compressor's input.

        whole: all heads, of which keys and values are read only at the first pass
        own:   fields of LayerSignals stored with each head's tokens; a row may be longer than its head
        """
        cells, rows = list(self.cells), {name: list(numbers) for name, numbers in own.items()}
        positions = own.get("positions") if self.first else None  # later each head has its own

        def source(layer: int, head: int | None) -> KeySource:
            if head is None:
                return whole.source(layer)
            return of_head(layer, head, cells[layer][head], int(self.tokens[layer, head]))

        def signals(layer: int) -> LayerSignals:
            found = whole.signals(layer)
            if positions is None:
                return found
            table = positions.flat.view(*self.tokens.shape, -1)
            return replace(found, positions=table[layer, :, : int(self.tokens[layer, 0])])

        def own_signals(layer: int, head: int) -> dict[str, Tensor]:
            num_tokens = int(self.tokens[layer, head])
            return {name: numbers[layer][head][None, :num_tokens] for name, numbers in rows.items()}

        tokens, end = self.tokens, whole.logical_len
        return HeadsQuestion(
            source, signals, tokens, self.prompt_slots, end, self.first, own_signals, whole.stack
        )

    def move(
        self,
        choice: UnevenChoice,
        blocks: np.ndarray,
        compact: Callable[[Tensor, Tensor, Tensor], None],
        max_cells: int,
    ) -> CellTable:
        """Move each head's survivors into its cells of the new blocks [n]. Heads are gathered whole before
        they are written, about max_cells at a time.

        compact: moves slots [M] of source cells into target cells, over the view in which cells are blocks
        """
        size, kept = self.cache.block_size, choice.kept
        num_kept = kept.counts // size
        table, order = assign_cells(self.present, self.num_cells, num_kept, self._natural(blocks))
        for part in CellMoves(self.present, self.num_cells, kept, table, order).parts(size, max_cells):
            compact(*part)
        return CellTable(table, num_kept, len(blocks), choice.prompt_slots + self._later_prompt)
