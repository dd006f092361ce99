"""Counters of compression among vLLM's metrics.

Their names do not begin with `vllm:`: vLLM unregisters everything that does whenever it makes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter

LABELS = ("model_name", "engine")
COUNTERS = {
    "tokens_evicted": (
        "kvreclaim_tokens_evicted",
        "Tokens evicted from the KV cache, per layer and KV head.",
    ),
    "blocks_freed": ("kvreclaim_blocks_freed", "KV cache blocks that compression gave back to the pool."),
    "compactions": ("kvreclaim_compactions", "Compressions of a request that were carried out."),
    "snapshot_tokens": (
        "kvreclaim_snapshot_tokens",
        "Prompt tokens that were not computed because a snapshot has what compression kept of them.",
    ),
    "seconds": ("kvreclaim_compression_seconds", "Time that the worker of rank 0 spent compressing."),
}
"""Name of a figure in Totals -> counter and its help."""


class Counters:
    """One counter per figure of Totals, with a label for each engine; a second instance counts on.

    Args:
        engines: indexes; each is on the page with 0 from the start
    """

    def __init__(
        self, model_name: str, engines: Iterable[int], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self.model_name = model_name
        self.counters = {figure: _counter(*COUNTERS[figure], registry) for figure in COUNTERS}
        for engine in engines:
            self.add({}, engine)

    def add(self, figures: Mapping[str, float], engine: int) -> None:
        """Add the figures since the last call, by the names of Totals."""
        for figure, counter in self.counters.items():
            counter.labels(self.model_name, str(engine)).inc(figures.get(figure, 0))


def _counter(name: str, text: str, registry: CollectorRegistry) -> Counter:
    existing = registry._names_to_collectors.get(name)
    return existing if isinstance(existing, Counter) else Counter(name, text, LABELS, registry=registry)
