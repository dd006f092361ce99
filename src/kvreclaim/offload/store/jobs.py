"""Jobs of the disk workers, and their outcomes."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum

from kvreclaim.memory.prefix.index import BlockName


class JobOutcome(StrEnum):
    """OK, or the single reason of a failure."""

    OK = "ok"

    SHORT = "short"
    """The file, or the disk, ended within the record."""
    BLANK = "blank"
    """The slot never had a record."""
    HEADER = "header"
    """The header's bytes are corrupt."""
    VERSION = "version"
    """The record's version is unknown."""
    NAMESPACE = "namespace"
    """A valid record of another model, format or layout."""
    OTHER = "other"
    """A valid record of other tokens, or of the same after others."""
    LENGTH = "length"
    """The payload, or the tokens, have another length."""
    PAYLOAD = "payload"
    """The payload's bytes are corrupt."""

    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    DROPPED = "dropped"
    """A store dropped from a full queue."""
    READ_ONLY = "read_only"
    """A store rejected after too many failures."""
    OFF = "off"
    """The disk does not respond, or was closed."""

    @property
    def is_corrupt(self) -> bool:
        """Whether the slot's content is unusable: a miss, and the slot is free."""
        return self in CORRUPT

    @property
    def is_failure(self) -> bool:
        """Whether the disk, not the record, caused it."""
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
    """buffer: source of a store, or target of a load; submitted_at, started_at: of the workers' clock."""

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
    """Counts since the start. bytes: of completed stores and loads; io_errors: of the disk, including a full
    one; dropped: stores that were not tried, for any reason."""

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
