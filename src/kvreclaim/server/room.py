"""Limits on outputs of one request, and of all requests of one key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvreclaim.server.config import ServerConfig
from kvreclaim.server.errors import ApiError


class ConcurrencyLimiter:
    """Counts outputs, prompts × n, from when they are queued until they have ended."""

    def __init__(self, config: ServerConfig) -> None:
        self.per_request = config.max_outputs_per_request
        self.per_key = outputs_per_key(config)
        self.taken: Counter[str | None] = Counter()

    def check(self, tenant: str | None, num_prompts: int, n: int) -> None:
        """Raises: ApiError 400 for what no request may want, 429 for what this one has to wait for."""
        wanted, limit = num_prompts * n, self.per_request
        if self.per_key is not None:
            limit = min(limit, self.per_key)
        if wanted > limit:
            raise ApiError(
                400,
                f"the request asks for {wanted} outputs ({num_prompts} prompts, n {n}), at most {limit} are "
                "allowed at once; split it.",
                param="prompt" if num_prompts > 1 else "n",
            )
        if self.per_key is not None and self.taken[tenant] + wanted > self.per_key:
            raise ApiError(
                429,
                f"{self.taken[tenant]} outputs of this key wait or run, the limit is {self.per_key}; "
                "try again when some have ended.",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )

    @contextmanager
    def take(self, tenant: str | None, num_outputs: int) -> Iterator[None]:
        """Count them until the end of the block."""
        self.taken[tenant] += num_outputs
        try:
            yield
        finally:
            self.taken[tenant] -= num_outputs
            if not self.taken[tenant]:
                del self.taken[tenant]


def outputs_per_key(config: ServerConfig) -> int | None:
    """The operator's limit; else half of the queue if there are several keys, so that none can fill it."""
    if config.max_concurrent_outputs_per_key is not None or len(config.api_keys) < 2:
        return config.max_concurrent_outputs_per_key
    return max(1, config.max_queue_len // 2)
