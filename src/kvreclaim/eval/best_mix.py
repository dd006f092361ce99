"""The best policy and format for every number of bytes: eviction and quantisation on one scale."""

from __future__ import annotations

from collections.abc import Sequence

from kvreclaim.eval.report import EvalReport, EvalRow
from kvreclaim.eval.task import Metric

HEADINGS = ("KiB a token", "fewer bytes", "best mix", "{metric}", "95 % CI", "of full")


def frontier(rows: Sequence[EvalRow]) -> list[EvalRow]:
    """The rows of one task that no other beats with as few bytes, smallest first: with so many bytes at
    hand, the last row that takes no more of them is the best that was tried."""
    done = [row for row in rows if row.status == "ok" and row.value is not None and row.bytes_per_token]
    best: list[EvalRow] = []
    for row in sorted(done, key=lambda row: (row.bytes_per_token or 0.0, -_worth(row))):
        if not best or _worth(row) > _worth(best[-1]):
            best.append(row)
    return best


def mixes(report: EvalReport) -> list[str]:
    """The tasks of which a best mix is worth a table: those with several formats."""
    return [task for task in report.tasks if len({row.kv_cache_dtype for row in report.of(task)}) > 1]


def best_mix_lines(report: EvalReport, task: str) -> list[tuple[str, ...]]:
    """HEADINGS' cells of every row of the frontier. Fewer bytes: than the full cache in the model's own
    dtype."""
    lines: list[tuple[str, ...]] = []
    for row in frontier(report.of(task)):
        size = row.bytes_per_token or 0.0
        interval = "–" if row.ci95 is None else f"{row.ci95[0]:.3f} – {row.ci95[1]:.3f}"
        lines.append(
            (
                f"{size / 1024:.3g}",
                f"{report.header.kv_bytes_per_token / size:.1f} ×",
                row.mix,
                f"{row.value:.3f}",
                interval,
                "–" if row.of_full is None else f"{row.of_full:.3f}",
            )
        )
    return lines


def _worth(row: EvalRow) -> float:
    """Higher is better."""
    value = row.value or 0.0
    return -value if row.metric is Metric.PERPLEXITY else value
