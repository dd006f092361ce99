"""Where the tokens of a compressed sequence lie, as tensors and tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvreclaim.compression.uneven import Heads
from kvreclaim.ops.cell_tables import CellTable


@dataclass(slots=True, eq=False)
class CompressionState:
    """State of an eviction method for one sequence between two passes, besides its Account.

    slot_positions: [L, K, slots] int32 logical positions, only for models with sliding windows
    cells:          where each head's tokens lie, only where heads keep unequal numbers
    head_positions: [n] int32 of each layer and head, logical positions of what the last pass has left there,
                    only where heads keep unequal numbers and their policy asks
    rounded:        tokens that rounding unequal counts to blocks moved from head to head
    """

    slot_positions: Tensor | None = None
    cells: CellTable | None = None
    head_positions: Heads | None = None
    rounded: int = 0

    def fork(self) -> CompressionState:
        """The child's state. Tensors are replaced, never written in place, so they are shared."""
        return replace(self, rounded=0)
