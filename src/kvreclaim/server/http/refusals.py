"""Connections that were refused before there was a request: all are counted, some logged."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

LINE_S = 10.0
"""Between two lines about the same status at least: who can reach the port cannot fill the log."""


class Refusals:
    """Told of each refusal, by its status.

    count: adds it to the metrics
    """

    def __init__(self, count: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._said_s: dict[int, float] = {}
        self._unsaid: Counter[int] = Counter()

    def note(self, status: int, client: str) -> None:
        """client: the address or network of who was refused."""
        self._count(status)
        now, said_s = self._clock(), self._said_s.get(status)
        if said_s is not None and now < said_s + LINE_S:
            self._unsaid[status] += 1
            return
        self._said_s[status] = now
        fields = {"status": status, "client": client, "unlogged": self._unsaid.pop(status, 0)}
        logger.warning("a connection was refused: %d", status, extra={"fields": fields})
