"""Jobs of the disk workers, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.memory.prefix.keys import BlockName
from kvreclaim.tiers.outcome import JobOutcome


@dataclass(slots=True, eq=False)
class TierJob:
    """buffer: what a store writes, or where a load goes; submitted_at, started_at: of the workers' clock."""

    job_id: int
    is_store: bool
    slot: int
    key: BlockName
    buffer: memoryview
    submitted_at: float
    started_at: float | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's result. seconds: since it left the queue, 0 if it never did; num_bytes: of payload moved."""

    job_id: int
    outcome: JobOutcome
    seconds: float
    num_bytes: int


@dataclass(slots=True)
class DiskCounters:
    """Since the start. bytes and seconds are of stores and loads that were made; io_errors: of the disk,
    a full one included; dropped: stores that were not tried, whatever for."""

    stores: int = 0
    loads: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    corrupt: int = 0
    io_errors: int = 0
    dropped: int = 0

    def count(self, job: TierJob, outcome: JobOutcome, seconds: float) -> None:
        if outcome is JobOutcome.OK and job.is_store:
            self.stores += 1
            self.stored_bytes += job.buffer.nbytes
            self.store_seconds += seconds
        elif outcome is JobOutcome.OK:
            self.loads += 1
            self.loaded_bytes += job.buffer.nbytes
            self.load_seconds += seconds
        elif outcome in (JobOutcome.NO_SPACE, JobOutcome.IO_ERROR) or (
            job.is_store and outcome is JobOutcome.SHORT
        ):
            self.io_errors += 1
        elif outcome.is_corrupt:
            self.corrupt += 1
        elif job.is_store:
            self.dropped += 1
