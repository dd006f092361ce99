"""What was looked for and found below the pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounts:
    """Since the start. Tokens in full blocks, counted whenever a sequence is admitted.

    asked:          that the pool did not have
    from_host:      of these, found on the host; from_disk: read from disk for the sequence before
    resumed_blocks: moved back for sequences that had been parked
    """

    asked: int = 0
    from_host: int = 0
    from_disk: int = 0
    resumed_blocks: int = 0
