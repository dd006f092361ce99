"""What the counters hold, in prometheus_client's terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvreclaim.engine.core.engine import Engine
from kvreclaim.engine.face.exports import MemoryStats
from kvreclaim.server.metrics.catalogue import (
    COUNTERS,
    ENGINE_LABELS,
    GAUGES,
    HISTOGRAMS,
    HTTP_COUNTERS,
    Kind,
    Metric,
)
from kvreclaim.server.metrics.http import HttpCounts
from kvreclaim.server.metrics.observer import Histogram, MetricsObserver

FINISH_REASONS = ("stop", "length", "abort", "error")
Values = float | Mapping[str, float]
"""Of a metric: one value, or one per value of its label."""


class MetricsCollector(Collector):
    """Reads a consistent copy at each scrape; the engine waits for that copy at most, not for its text.

    model_name: the label's value
    """

    def __init__(self, engine: Engine, observer: MetricsObserver, http: HttpCounts, model_name: str) -> None:
        self._observer = observer
        self._http = http
        self._labels = (model_name, "0")
        config = asdict(engine.config) | {
            "num_gpu_blocks": engine.config.num_blocks,
            "cache_dtype": engine.kv_format.name,
            "engine": "0",
        }
        self._config = {name: str(value) for name, value in config.items()}

    def collect(self) -> Iterator[Family]:
        with self._observer.lock:
            values = engine_values(self._observer)
            histograms = {name: each.copy() for name, each in self._observer.histograms.items()}
        yield from (self._family(metric, values[metric.name]) for metric in (*GAUGES, *COUNTERS))
        yield from (self._histogram(metric, histograms[metric.name]) for metric in HISTOGRAMS)
        for metric, found in zip(HTTP_COUNTERS, (self._http.by_class(), self._http.by_status), strict=True):
            family = CounterMetricFamily(metric.name, metric.meaning, labels=metric.labels)
            for labels, count in found.items():
                family.add_metric(labels, count)
            yield family
        yield InfoMetricFamily("vllm:cache_config", "The engine's configuration.", self._config)

    def _family(self, metric: Metric, values: Values) -> Family:
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.meaning, labels=metric.labels)
        rows: Iterable[tuple[str, float]] = values.items() if isinstance(values, Mapping) else [("", values)]
        for label, value in rows:
            family.add_metric((*self._labels, *([label] if label else [])), value)
        return family

    def _histogram(self, metric: Metric, histogram: Histogram) -> Family:
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=ENGINE_LABELS)
        bounds, buckets, seen = (*histogram.bounds, float("inf")), [], 0
        for bound, count in zip(bounds, histogram.counts, strict=True):
            seen += count
            buckets.append((floatToGoString(bound), float(seen)))
        family.add_metric(self._labels, buckets, histogram.total)
        return family


def registry_of(collector: MetricsCollector) -> CollectorRegistry:
    """A registry of its own, with the figures of the process besides."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def engine_values(seen: MetricsObserver) -> dict[str, Values]:
    """The value of every gauge and counter of the engine. The caller holds the observer's lock."""
    return _request_values(seen) | _cache_values(seen.figures.memory) | _compression_values(seen)


def _request_values(seen: MetricsObserver) -> dict[str, Values]:
    figures, totals = seen.figures, seen.totals
    preemptions = dict(totals.preemptions)
    return {
        "vllm:num_requests_running": figures.num_running,
        "vllm:num_requests_waiting": figures.num_waiting,
        "vllm:num_requests_waiting_by_reason": {"capacity": figures.num_waiting, "deferred": 0},
        "vllm:prompt_tokens": seen.prompt_tokens,
        "vllm:prompt_tokens_cached": seen.prompt_tokens_cached,
        "vllm:prompt_tokens_by_source": {
            "local_compute": seen.prompt_tokens - seen.prompt_tokens_cached,
            "local_cache_hit": seen.prompt_tokens_cached,
        },
        "vllm:generation_tokens": totals.generation_tokens,
        "vllm:num_preemptions": sum(preemptions.values()),
        "vllm:request_success": {reason: totals.finished.get(reason, 0) for reason in FINISH_REASONS},
        "kvreclaim:preemptions": preemptions,
        "kvreclaim:engine_steps": totals.steps,
        "kvreclaim:engine_step_seconds": seen.step_s,
    }


def _cache_values(memory: MemoryStats) -> dict[str, Values]:
    return {
        "vllm:kv_cache_usage_perc": memory.in_use / memory.num_blocks,
        "vllm:prefix_cache_queries": memory.prefix_query_tokens,
        "vllm:prefix_cache_hits": memory.prefix_hit_tokens,
        "kvreclaim:blocks": {"in_use": memory.in_use, "cached": memory.cached, "free": memory.free},
        "kvreclaim:blocks_peak": memory.peak_in_use,
        "kvreclaim:pinned_blocks": memory.pinned,
        "kvreclaim:pins_refused": memory.pins_refused,
        "kvreclaim:prefix_misses": memory.misses,
        "kvreclaim:prefix_evictions": memory.prefix_evictions,
    }


def _compression_values(seen: MetricsObserver) -> dict[str, Values]:
    totals, net_freed = seen.totals, seen.blocks_freed - seen.blocks_taken
    return {
        "kvreclaim:reclaim_efficiency": (
            net_freed / totals.blocks_perfect if totals.blocks_perfect else float("nan")
        ),
        "kvreclaim:tokens_evicted": totals.tokens_evicted,
        "kvreclaim:blocks_freed": seen.blocks_freed,
        "kvreclaim:blocks_taken": seen.blocks_taken,
        "kvreclaim:blocks_perfect": totals.blocks_perfect,
        "kvreclaim:compactions": totals.compactions,
        "kvreclaim:compactions_postponed": totals.compactions_postponed,
        "kvreclaim:compaction_seconds": totals.compact_s,
        "kvreclaim:scoring_seconds": totals.score_s,
    }
