"""Prometheus metrics: what there is (catalogue), who counts (observer, http), how it is told (collector)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client import generate_latest

from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.errors import EngineDeadError
from kvreclaim.server.metrics.collector import HttpCounts, MetricsCollector, registry_of
from kvreclaim.server.metrics.observer import Counted, count

PATIENCE_S = 2.0
"""A scraper does not wait for a longer step: it gets what was counted when the last one asked."""


class Metrics:
    """The metrics of one server, in a registry of their own.

    http: to be told by the server
    """

    def __init__(self, served: ServedModel, model_name: str, engine_pid: int | None = None) -> None:
        self.http = HttpCounts()
        self._collector = MetricsCollector(served, self.http, model_name)
        self.registry = registry_of(self._collector, engine_pid)

    async def begin(self, engine: EngineClient) -> None:
        """Let the engine count from now on."""
        self.take(await engine.call(count))

    async def refresh(self, engine: EngineClient) -> None:
        """Ask the engine; what is known already stays if it does not answer in time, or never will."""
        with suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                self.take(await engine.call(count, allow_dead=True))

    def take(self, counted: Counted) -> None:
        """Newer counts of the engine."""
        self._collector.counted = counted

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
