"""Connections refused before a request exists: all are counted, some logged."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

LINE_S = 10.0
"""Least seconds between two lines about the same status, so that clients cannot fill the log."""


class Refusals:
    """Counts refusals by status, and logs them at a limited rate.

    count: adds one to the metrics
    """

    def __init__(self, count: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._logged_s: dict[int, float] = {}
        self._unlogged: Counter[int] = Counter()

    def note(self, status: int, client: str) -> None:
        """client: its address or network"""
        self._count(status)
        now, logged_s = self._clock(), self._logged_s.get(status)
        if logged_s is not None and now < logged_s + LINE_S:
            self._unlogged[status] += 1
            return
        self._logged_s[status] = now
        fields = {"status": status, "client": client, "unlogged": self._unlogged.pop(status, 0)}
        logger.warning("a connection was refused: %d", status, extra={"fields": fields})
