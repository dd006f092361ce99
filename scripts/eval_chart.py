"""Accuracy at equal bytes, the best mixes and the chart, from the JSON of `kvreclaim eval`."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from kvreclaim.bench.common import markdown
from kvreclaim.eval.best_mix import HEADINGS, best_mix_lines, mixes
from kvreclaim.eval.charts import quality_chart
from kvreclaim.eval.report import EvalReport, EvalRow


def at_equal_bytes(report: EvalReport) -> Iterator[list[str]]:
    """A line for each policy and format, a column for each share: mean over the tasks (tokens kept)."""
    shares = sorted({row.fraction for row in report.rows}, reverse=True)
    yield ["policy", "KV format", *(f"{100 * share:.4g} %" for share in shares)]
    for policy in report.policies:
        for form in report.kv_cache_dtypes:
            rows = [row for row in report.rows if (row.policy, row.kv_cache_dtype) == (policy, form)]
            cells = ([row for row in rows if row.fraction == share] for share in shares)
            yield [f"`{policy}`", f"`{form}`", *map(cell, cells)]


def cell(rows: list[EvalRow]) -> str:
    """Of one share, all tasks."""
    values = [row.value for row in rows if row.value is not None]
    if not rows or len(values) < len(rows):
        return "–" if not rows else rows[0].status
    return f"{mean(values):.3f} ({rows[0].budget:,})"


def main() -> None:
    """Read the report named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="report.json of `kvreclaim eval`")
    parser.add_argument("--out", type=Path, help="the SVG to write")
    asked = parser.parse_args()
    report = EvalReport.model_validate_json(asked.report.read_text(encoding="utf-8"))
    headings, *lines = at_equal_bytes(report)
    print(f"mean over {', '.join(report.tasks)} (tokens kept)\n\n{markdown(headings, lines)}\n")
    for task in mixes(report):
        headings = [heading.format(metric=report.of(task)[0].metric.value) for heading in HEADINGS]
        print(f"{task}\n\n{markdown(headings, best_mix_lines(report, task))}\n")
    if asked.out is not None and (svg := quality_chart(report)) is not None:
        asked.out.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
