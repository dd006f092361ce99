"""Outcome of one read or write of a record."""

from __future__ import annotations

import errno
from enum import StrEnum


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
