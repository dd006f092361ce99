"""Metrics of a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    families: dict[str, Metric]

    @classmethod
    def of(cls, text: str) -> Scrape:
        return cls({family.name: family for family in text_string_to_metric_families(text)})

    @property
    def names(self) -> set[str]:
        """Names of all samples, as in PromQL."""
        return {sample.name for family in self.families.values() for sample in family.samples}

    def rows(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    yield sample.labels, sample.value

    def value(self, name: str, **labels: str) -> float:
        """Value of the only sample with these labels."""
        found = [value for _, value in self.rows(name, **labels)]
        assert len(found) == 1, f"{name} {labels}: {len(found)} samples"
        return found[0]

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.rows(name, **labels))

    def buckets(self, name: str) -> list[int]:
        """Samples in each bucket of a histogram, not cumulated, with +Inf last."""
        upto = sorted((float(labels["le"]), value) for labels, value in self.rows(f"{name}_bucket"))
        return [int(b[1] - a[1]) for a, b in zip([(0.0, 0.0), *upto], upto, strict=False)]
