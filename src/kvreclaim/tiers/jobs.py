"""Jobs of the disk workers, and their outcomes."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum

from kvreclaim.memory.prefix.keys import BlockName


class JobOutcome(StrEnum):
    """OK, or the one reason why not."""

    OK = "ok"

    SHORT = "short"
    """The file, or the disk, ended within the record."""
    BLANK = "blank"
    """No record was ever written here."""
    HEADER = "header"
    """The header's bytes are not those that were written."""
    VERSION = "version"
    """Written in a way that this version does not know."""
    NAMESPACE = "namespace"
    """A whole record of another model, format or layout."""
    OTHER = "other"
    """A whole record of other tokens, or of the same after others."""
    LENGTH = "length"
    """The payload, or the tokens, are of another length."""
    PAYLOAD = "payload"
    """The payload's bytes are not those that were written."""

    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    DROPPED = "dropped"
    """A store that was queued for longer than others could wait."""
    READ_ONLY = "read_only"
    """A store after too many have failed."""
    OFF = "off"
    """The disk does not answer, or it was closed."""

    @property
    def is_corrupt(self) -> bool:
        """Whether the slot does not hold what it was read for: a miss, and the slot is free."""
        return self in CORRUPT

    @property
    def is_failure(self) -> bool:
        """Whether the disk, and not the record, is to blame."""
        return self in FAILURES


CORRUPT = frozenset(
    {
        JobOutcome.SHORT,
        JobOutcome.BLANK,
        JobOutcome.HEADER,
        JobOutcome.VERSION,
        JobOutcome.NAMESPACE,
        JobOutcome.OTHER,
        JobOutcome.LENGTH,
        JobOutcome.PAYLOAD,
    }
)
FAILURES = frozenset({JobOutcome.SHORT, JobOutcome.NO_SPACE, JobOutcome.IO_ERROR})
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def outcome_of(error: OSError) -> JobOutcome:
    return JobOutcome.NO_SPACE if error.errno in NO_SPACE else JobOutcome.IO_ERROR


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
    """Since the start. bytes are of stores and loads that were made; io_errors: of the disk, a full one
    included; dropped: stores that were not tried, whatever for."""

    stores: int = 0
    loads: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    corrupt: int = 0
    io_errors: int = 0
    dropped: int = 0

    def count(self, job: TierJob, outcome: JobOutcome) -> None:
        if outcome is JobOutcome.OK and job.is_store:
            self.stores += 1
            self.stored_bytes += job.buffer.nbytes
        elif outcome is JobOutcome.OK:
            self.loads += 1
            self.loaded_bytes += job.buffer.nbytes
        elif outcome in (JobOutcome.NO_SPACE, JobOutcome.IO_ERROR) or (
            job.is_store and outcome is JobOutcome.SHORT
        ):
            self.io_errors += 1
        elif outcome.is_corrupt:
            self.corrupt += 1
        elif job.is_store:
            self.dropped += 1
