"""Prometheus metrics: definitions (catalogue), counting (observer, http), export (collector)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client import generate_latest

from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.errors import EngineDeadError
from kvreclaim.server.metrics.collector import MetricsCollector, registry_of
from kvreclaim.server.metrics.observer import Counted, count
from kvreclaim.server.shared.access import HttpCounts

PATIENCE_S = 2.0
"""Longest wait for a step, in seconds; after that a scraper gets the previous counts."""


class Metrics:
    """The metrics of one server, in their own registry.

    http: a watcher of the server
    """

    def __init__(self, served: ServedModel, model_name: str, engine_pid: int | None = None) -> None:
        self.http = HttpCounts()
        self._collector = MetricsCollector(served, self.http, model_name)
        self.registry = registry_of(self._collector, engine_pid)

    async def begin(self, engine: EngineClient) -> None:
        """Start counting in the engine."""
        self.take(await engine.call(count))

    async def refresh(self, engine: EngineClient) -> None:
        """Read the engine's counts; the previous ones stay if it does not answer in time."""
        with suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                self.take(await engine.call(count, allow_dead=True))

    def take(self, counted: Counted) -> None:
        self._collector.counted = counted

    def text(self) -> bytes:
        return generate_latest(self.registry)
