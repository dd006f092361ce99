"""A pass of one sequence: its plan and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kvreclaim.compression.compressor import Compressor
from kvreclaim.engine.request.request import Sequence
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.schedule import Pass


@dataclass(frozen=True, slots=True, eq=False)
class CompactionJob:
    """A planned pass. If survivors move, the sequence already has its new table. The bytes of the source
    blocks remain until every job of the round has chosen."""

    seq: Sequence
    compressor: Compressor
    plan: Pass[int]

    @property
    def next_position(self) -> int:
        """Position of the next query."""
        return self.plan.num_tokens if self.compressor.policy.cache_relative else self.plan.logical_len


@dataclass(frozen=True, slots=True, eq=False)
class CompactionResult:
    """The result of a pass. Bytes, signals and state tensors are up to date.

    kept:         the live slots that stay, ascending: [L | 1, K | 1, M] int64, or unequally many of each head
    gone:         table entries with unused blocks, for eviction methods that move nothing; the caller frees
                  them
    prompt_slots: remaining leading slots with prompt tokens, where they depend on the choice
    """

    kept: Tensor | HeadRows
    gone: tuple[int, ...] = ()
    prompt_slots: int | None = None


class PassMethod(Protocol):
    """One eviction method. The result of `choose` is an argument of `apply` and opaque to others."""

    def choose(self, jobs: list[CompactionJob]) -> list[Any]:
        """Choose the kept slots of sequences that share a compressor. Changes nothing."""
        ...

    def apply(self, job: CompactionJob, choice: Any) -> CompactionResult:
        """Carry out a choice."""
        ...
