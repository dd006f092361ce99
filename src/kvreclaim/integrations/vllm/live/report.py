"""One line in the log for every thousand passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from kvreclaim.integrations.vllm.accounts import PlacedPool
from kvreclaim.integrations.vllm.passes import Totals

logger = logging.getLogger("vllm.kvreclaim")

EVERY = 1000
"""Passes."""


class Report:
    """Knows the totals of a ledger, which go on elsewhere, and what requests have had of its pool."""

    def __init__(self, totals: Totals, pool: PlacedPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._pool = pool
        self._clock = clock
        self._ended_places = 0
        self._num_told = 0
        self._since_s = clock()
        self._since_seconds = totals.seconds

    def ending(self, request_id: str) -> None:
        """The request is about to lose its blocks: it has ended, or is preempted."""
        self._ended_places += self._pool.places(request_id)

    def passed(self, running: Iterable[str]) -> None:
        """Passes may have been planned. running: ids of the requests that hold blocks."""
        num_lines = self._totals.compactions // EVERY
        if num_lines == self._num_told:
            return
        held = self._ended_places + sum(self._pool.places(request_id) for request_id in running)
        now_s, totals = self._clock(), self._totals
        for number in range(self._num_told + 1, num_lines + 1):
            logger.info(
                "kvreclaim: %s passes: %s tokens evicted, %s blocks given back (%.0f %% of those that "
                "requests have had); the last %s took %.1f %% of %.0f s",
                *(f"{number * EVERY:,}", f"{totals.tokens_evicted:,}", f"{totals.blocks_freed:,}"),
                100 * totals.blocks_freed / max(1, held),
                f"{EVERY:,}",
                100 * (totals.seconds - self._since_seconds) / max(1e-9, now_s - self._since_s),
                now_s - self._since_s,
            )
        self._num_told, self._since_s, self._since_seconds = num_lines, now_s, totals.seconds
