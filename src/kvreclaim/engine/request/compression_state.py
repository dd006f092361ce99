"""Positions and cells of a compressed sequence's tokens, as tensors and tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvreclaim.ops.cell_tables import CellTable
from kvreclaim.ops.head_rows import HeadRows


@dataclass(slots=True, eq=False)
class CompressionState:
    """State of an eviction method for one sequence between two passes, besides its EvictionCounters.

    slot_positions: [L, K, slots] int32 logical positions, only for models with sliding windows
    cells:          cells of each head's tokens, only where heads keep unequal numbers
    head_positions: int32 logical positions of the tokens that the last pass left in each head, only where
                    heads keep unequal numbers and their policy needs them
    rounded:        tokens that rounding unequal counts to blocks moved from head to head
    """

    slot_positions: Tensor | None = None
    cells: CellTable | None = None
    head_positions: HeadRows | None = None
    rounded: int = 0

    def fork(self) -> CompressionState:
        """The child's state. Tensors are replaced, never written in place, so they are shared."""
        return replace(self, rounded=0)
