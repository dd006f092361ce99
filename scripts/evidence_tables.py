"""Print the tables of docs/evidence.md from the JSON files of `kvreclaim eval`: one table for each task."""

from __future__ import annotations

import argparse
from math import log
from pathlib import Path

from kvreclaim.eval import EvalReport, EvalRow, Metric


def verdict(row: EvalRow, full: EvalRow) -> str:
    """The value with its interval, and in brackets the share of the full cache's (of its logarithm, where it
    is a perplexity)."""
    if row.status != "ok" or row.value is None or full.value is None:
        return row.status
    interval = f" ({row.ci95[0]:.3f}–{row.ci95[1]:.3f})" if row.ci95 else ""
    if row.metric is Metric.PERPLEXITY:
        return f"{row.value:.2f}{interval} [{log(row.value) / log(full.value):.3f}]"
    return f"{row.value:.3f}{interval} [{row.value / full.value:.3f}]"


def table(report: EvalReport, task: str) -> list[str]:
    """A line for each policy and format, a column for each share of the bytes; the best first."""
    rows = report.of(task)
    full = next(row for row in rows if row.policy == "full")
    fractions = sorted({row.fraction for row in rows if row.policy != "full"}, reverse=True)
    by_name: dict[str, dict[float, EvalRow]] = {}
    for row in rows:
        by_name.setdefault(row.name, {})[row.fraction] = row
    sign = 1 if full.metric is Metric.PERPLEXITY else -1
    named = sorted(by_name.items(), key=lambda item: sign * (next(iter(item[1].values())).value or 0.0))
    lines = [f"{task}, {report.summary(task)}", ""]
    lines += [f"| policy | {' | '.join(f'{100 * f:.3g} %' for f in fractions)} |"]
    lines += ["|---" * (1 + len(fractions)) + "|"]
    for name, cells in named:
        found = [cells.get(f) or (cells.get(1.0) if name.startswith("full") else None) for f in fractions]
        texts = [verdict(row, full) if row is not None else "" for row in found]
        lines.append(f"| `{name}` | {' | '.join(texts)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+")
    for path in parser.parse_args().reports:
        report = EvalReport.model_validate_json(path.read_text(encoding="utf-8"))
        print(f"\n{path.name}: {report.header.command}\n")
        for task in report.tasks:
            print("\n".join(table(report, task)))


if __name__ == "__main__":
    main()
