"""Exports the counts as prometheus_client's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.errors import EngineDeadError
from kvreclaim.server.metrics.catalogue import (
    COUNTERS,
    ENGINE_LABELS,
    GAUGES,
    HISTOGRAMS,
    HTTP_COUNTERS,
    MetricKind,
    MetricSpec,
)
from kvreclaim.server.metrics.observer import Counted, Histogram, count
from kvreclaim.server.metrics.tiers import Values
from kvreclaim.server.shared.access import HttpCounts

PATIENCE_S = 2.0
"""Longest wait for a step, in seconds; after that a scraper gets the previous counts."""


class MetricsCollector(Collector):
    """Exports the last copy of the engine's counts.

    model_name: the label's value
    """

    def __init__(self, served: ServedModel, http: HttpCounts, model_name: str) -> None:
        self.counted: Counted | None = None
        self._http = http
        self._labels = (model_name, "0")
        config = served.config | {
            "num_gpu_blocks": served.num_blocks,
            "cache_dtype": served.kv_format,
            "engine": "0",
        }
        self._config = {name: str(value) for name, value in config.items()}

    def collect(self) -> Iterator[Family]:
        assert self.counted is not None, "the engine has begun to count"
        values, histograms = self.counted.values, self.counted.histograms
        yield from (self._family(metric, values[metric.name]) for metric in (*GAUGES, *COUNTERS))
        yield from (self._histogram(metric, histograms[metric.name]) for metric in HISTOGRAMS)
        for metric, found in zip(HTTP_COUNTERS, (self._http.by_class(), self._http.by_status), strict=True):
            family = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
            for labels, number in found.items():
                family.add_metric(labels, number)
            yield family
        yield InfoMetricFamily("vllm:cache_config", "The engine's configuration.", self._config)

    def _family(self, metric: MetricSpec, values: Values) -> Family:
        kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.meaning, labels=metric.labels)
        rows = values.items() if isinstance(values, Mapping) else [((), values)]
        for labels, value in rows:
            own = (labels,) if isinstance(labels, str) else labels
            family.add_metric((*self._labels, *own), value)
        return family

    def _histogram(self, metric: MetricSpec, histogram: Histogram) -> Family:
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=ENGINE_LABELS)
        bounds, buckets, seen = (*histogram.bounds, float("inf")), [], 0
        for bound, number in zip(bounds, histogram.counts, strict=True):
            seen += number
            buckets.append((floatToGoString(bound), float(seen)))
        family.add_metric(self._labels, buckets, histogram.total)
        return family


def registry_of(collector: MetricsCollector, engine_pid: int | None) -> CollectorRegistry:
    """Make a registry with the figures of this process, and of the engine's process if there is one."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    if engine_pid is not None:
        ProcessCollector(namespace="kvreclaim_engine", pid=lambda: engine_pid, registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


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
