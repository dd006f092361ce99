"""Prometheus metrics: what there is (catalogue), who counts (observer, http), how it is told (collector)."""

from __future__ import annotations

from kvreclaim.engine.core.engine import Engine
from kvreclaim.server.metrics.collector import MetricsCollector, registry_of
from kvreclaim.server.metrics.http import HttpCounts
from kvreclaim.server.metrics.observer import MetricsObserver


class Metrics:
    """The metrics of one server, in a registry of their own.

    observer: to be told by the engine; http: to be told by the server
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.observer = MetricsObserver(engine)
        self.http = HttpCounts()
        self.registry = registry_of(MetricsCollector(engine, self.observer, self.http, model_name))
