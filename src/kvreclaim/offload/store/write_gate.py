"""Decides when a disk that refuses writes is tried again."""

from __future__ import annotations

import logging
from collections.abc import Callable

LOGGER = logging.getLogger(__name__)

MAX_FAILURES = 3
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0


class WriteGate:
    """Closed for a minute after three failures in a row; each further failure doubles the time, up to an
    hour.

    Args:
        clock: seconds
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._opens_at = clock()

    @property
    def is_open(self) -> bool:
        return self._clock() >= self._opens_at

    def succeeded(self) -> None:
        self._failures, self._pause_s = 0, FIRST_PAUSE_S

    def failed(self, reason: str) -> None:
        self._failures += 1
        if self._failures < MAX_FAILURES or not self.is_open:
            return
        LOGGER.warning(
            "writing blocks to disk has failed %d times in a row (%s); they are only read for %.0f s",
            self._failures,
            reason,
            self._pause_s,
        )
        self._opens_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
