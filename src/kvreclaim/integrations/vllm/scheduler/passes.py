"""Messages from the scheduler to the workers, and totals of passes.

The message travels inside vLLM's SchedulerOutput, by pickle: plain values, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.schedule.budget.compaction import Pass


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The requests that are compressed before this step, and their blocks.

    passes:   in their order, because a later one may write blocks that an earlier one has read
    settings: by request; statistics are the worker's own
    """

    passes: tuple[Pass[str], ...]
    settings: Mapping[str, CompressionConfig]


@dataclass(slots=True)
class Counts:
    """Sums over passes, those of requests that were preempted later included."""

    tokens_evicted: int = 0
    blocks_freed: int = 0
    compactions: int = 0

    def add(self, done: Pass[str]) -> None:
        """Count a pass; one that takes more blocks than it returns (others hold its sources) frees none."""
        self.tokens_evicted += done.num_tokens - done.keep
        self.blocks_freed += max(0, done.blocks_freed)
        self.compactions += 1


@dataclass(slots=True)
class Totals(Counts):
    """Sums since the start.

    seconds:         of the worker of rank 0
    snapshot_tokens: of prompts, that were not computed because a snapshot has them
    compressed, whole: requests with compression that have ended with and without a pass
    promised_tokens: budgets of the compressed ones; kept_tokens: what their last passes have left
    """

    seconds: float = 0.0
    snapshot_tokens: int = 0
    compressed: int = 0
    whole: int = 0
    promised_tokens: int = 0
    kept_tokens: int = 0

    def end(self, promised: int | None, kept: int) -> None:
        """Count a request with compression. kept: 0 without a pass."""
        self.whole += not kept
        self.compressed += bool(kept)
        self.promised_tokens += (promised or 0) * bool(kept)
        self.kept_tokens += kept
