"""What compression remembers of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Where a pass has put the tokens of each head. Never changed, so forks share it.

    table:        [L, K, W] int32 cells (ops.cells), the first `counts` of each row; the rest is padding
    counts:       [L, K] int64, full cells of each head
    num_blocks:   leading entries of the block table that these cells make up
    prompt_slots: [L, K] int64, leading slots of each head that hold prompt tokens
    """

    table: np.ndarray
    counts: np.ndarray
    num_blocks: int
    prompt_slots: np.ndarray


@dataclass(slots=True, eq=False)
class CompressionState:
    """What compression knows of one sequence between two passes.

    num_evicted:    tokens that each head no longer attends to (equal in every head)
    prompt_slots:   leading live slots that held prompt tokens after the last pass (0 if cells knows them)
    last_computed:  logical length at the last pass
    evicted:        [L, K, slots] bool, only where nothing moves (evict-only)
    slot_positions: [L, K, slots] int32 logical positions, only for models with sliding windows
    cells:          where each head's tokens lie, only where heads keep unequal numbers
    rounded:        tokens that rounding unequal counts to blocks moved from head to head
    inherited_evicted: num_evicted at the fork, which the parent has counted already
    """

    num_evicted: int = 0
    prompt_slots: int = 0
    last_computed: int = 0
    evicted: Tensor | None = None
    slot_positions: Tensor | None = None
    cells: Cells | None = None
    rounded: int = 0
    blocks_freed: int = 0
    blocks_perfect: int = 0
    compactions: int = 0
    postponed: int = 0
    inherited_evicted: int = 0

    def fork(self) -> CompressionState:
        """The child's state: same tokens gone, its own counts from zero. Tensors are replaced, never
        written in place, so they are shared."""
        return replace(
            self,
            rounded=0,
            blocks_freed=0,
            blocks_perfect=0,
            compactions=0,
            postponed=0,
            inherited_evicted=self.num_evicted,
        )
