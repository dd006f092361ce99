"""Observers of a scheduler: the page, if one is configured, and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreclaim.integrations.vllm.scheduler.accounts import PlacedPool, VllmRequest
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.integrations.vllm.scheduler.passes import Totals
from kvreclaim.schedule import Pass

if TYPE_CHECKING:
    from kvreclaim.integrations.vllm.live.server import PageServer

logger = logging.getLogger("vllm.kvreclaim")

EVERY = 1000
"""Passes."""


class Report:
    """Logs the totals of a ledger and the peak blocks of its requests."""

    def __init__(self, totals: Totals, pool: PlacedPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._pool = pool
        self._clock = clock
        self._ended_places = 0
        self._num_logged = 0
        self._since_s = clock()
        self._since_seconds = totals.seconds

    def ending(self, request_id: str) -> None:
        """The request is about to lose its blocks: it has ended, or is preempted."""
        self._ended_places += self._pool.places(request_id)

    def passed(self, running: Iterable[str]) -> None:
        """Passes may have been planned. running: ids of the requests that hold blocks."""
        num_lines = self._totals.compactions // EVERY
        if num_lines == self._num_logged:
            return
        held = self._ended_places + sum(self._pool.places(request_id) for request_id in running)
        now_s, totals = self._clock(), self._totals
        for number in range(self._num_logged + 1, num_lines + 1):
            logger.info(
                "kvreclaim: %s passes: %s tokens evicted, %s blocks given back (%.0f %% of those that "
                "requests have had); the last %s took %.1f %% of %.0f s",
                *(f"{number * EVERY:,}", f"{totals.tokens_evicted:,}", f"{totals.blocks_freed:,}"),
                100 * totals.blocks_freed / max(1, held),
                f"{EVERY:,}",
                100 * (totals.seconds - self._since_seconds) / max(1e-9, now_s - self._since_s),
                now_s - self._since_s,
            )
        self._num_logged, self._since_s, self._since_seconds = num_lines, now_s, totals.seconds


@dataclass(slots=True)
class TokenTotals:
    """Sums since the start. Of prompts those that were found in the prefix cache, too, are counted."""

    prompt: int = 0
    generated: int = 0
    queried: int = 0
    hit: int = 0


class TokenProgress:
    """Tokens by request, seen now and then: what each has come further by since. The prompt of a request that
    is preempted is computed anew."""

    def __init__(self) -> None:
        self.tokens = TokenTotals()
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self, requests: Mapping[str, VllmRequest]) -> None:
        """Count the tokens since the last call. O(requests)."""
        for request in requests.values():
            self._seen[request.request_id] = self._add(request)

    def freeing(self, request: VllmRequest) -> None:
        """Its blocks go."""
        self._seen[request.request_id] = 0, self._add(request)[1]

    def ended(self, request_id: str) -> None:
        """It has given its blocks back, and does not come again."""
        self._seen.pop(request_id, None)

    def _add(self, request: VllmRequest) -> tuple[int, int]:
        prompt = min(request.num_computed_tokens, request.num_prompt_tokens)
        output = request.num_tokens - request.num_prompt_tokens
        before = self._seen.get(request.request_id, (0, 0))
        self.tokens.prompt += max(0, prompt - before[0])
        self.tokens.generated += max(0, output - before[1])
        return prompt, output


class StepObserver:
    """Called in the scheduler's thread. Without a page what it costs a step is a comparison.

    Args:
        ledger: see there
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._report = Report(ledger.totals, ledger.pool)
        self.progress = TokenProgress()
        self.page: PageServer | None = None

    def begin_step(self) -> None:
        """Before anything of a step changes the pool."""
        if self.page is not None:
            self.page.recorder.begin_step()

    def passed(self, passes: Sequence[Pass[str]], running: Iterable[VllmRequest]) -> None:
        """The passes of a step have been planned."""
        if passes:
            self._report.passed(request.request_id for request in running)
            if self.page is not None:
                self.page.recorder.passed(passes)

    def end_step(self) -> None:
        """Note the end of a step; requests that ended have returned their blocks."""
        if self.page is not None:
            self.page.recorder.end_step()

    def freeing(self, request: VllmRequest) -> None:
        """It is about to lose its blocks: ended, or preempted."""
        self._report.ending(request.request_id)
        if self.page is not None:
            self.progress.freeing(request)

    def ended(self, request_id: str) -> None:
        """It has given its blocks back, and does not come again."""
        self.progress.ended(request_id)

    def looked_up(self, queried: int, hit: int) -> None:
        """Tokens of prompts that were looked up in the prefix cache, and those found."""
        self.progress.tokens.queried += queried
        self.progress.tokens.hit += hit

    def totals(self) -> dict[str, int]:
        """The totals of the page's frames."""
        totals, tokens = self._ledger.totals, self.progress.tokens
        return {
            "prompt_tokens": max(0, tokens.prompt - tokens.hit),
            "generation_tokens": tokens.generated,
            "tokens_evicted": totals.tokens_evicted,
            "compactions": totals.compactions,
            "prefix_query_tokens": tokens.queried,
            "prefix_hit_tokens": tokens.hit,
            "blocks_freed": totals.blocks_freed,
        }

    def close(self) -> None:
        """The engine ends."""
        if self.page is not None:
            self.page.close()
