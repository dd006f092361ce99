"""A pass of one sequence: what is planned, and what has been chosen."""

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
    """A pass to be carried out. Where survivors move, the sequence's table is the new one already; the bytes
    of the source blocks stay as they are until every job of the round has chosen."""

    seq: Sequence
    compressor: Compressor
    plan: Pass[int]

    @property
    def next_position(self) -> int:
        """Position of the next query."""
        return self.plan.num_tokens if self.compressor.policy.cache_relative else self.plan.logical_len


@dataclass(frozen=True, slots=True, eq=False)
class CompactionResult:
    """A pass whose bytes, signals and tensors of state are done.

    kept:         the live slots that stay, ascending: [L | 1, K | 1, M] int64, or unequally many of each head
    gone:         entries of the table whose blocks nobody needs any more, where nothing moves: the caller
                  gives them back
    prompt_slots: leading live slots left that hold prompt tokens, where only the choice tells
    """

    kept: Tensor | HeadRows
    gone: tuple[int, ...] = ()
    prompt_slots: int | None = None


class PassMethod(Protocol):
    """One way of compressing. What choose finds is for apply alone to understand."""

    def choose(self, jobs: list[CompactionJob]) -> list[Any]:
        """Choose what stays of sequences that share a compressor. Changes nothing."""
        ...

    def apply(self, job: CompactionJob, choice: Any) -> CompactionResult:
        """Carry it out."""
        ...
