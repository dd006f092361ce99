"""The report as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from kvreclaim.eval import charts
from kvreclaim.eval.report import EvalReport
from kvreclaim.eval.tables import tables
from kvreclaim.outputs import write_text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; }
code { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
NOTE = (
    "“Keeps” is the budget: tokens, or a share of the bytes of the full cache in the model's dtype at each "
    "sequence's final length; “tokens” is that budget per layer and head, in the row's KV format. Intervals "
    "are 95 %, over examples. “KV” is the most that a sequence's blocks held after its prompt, mean over the "
    "examples. “Of full” compares with the full cache in the "
    "first format on the same examples. Best mix: take the last line whose KiB a token fit."
)


def write_html(report: EvalReport, path: Path) -> None:
    """Write tables, charts (inlined SVG) and the setup."""
    write_text(path, render(report))


def render(report: EvalReport) -> str:
    title = escape(f"Policies at equal bytes: {report.header.model}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{title}</h1>{"".join(_body(report))}'


def _body(report: EvalReport) -> Iterator[str]:
    header = report.header
    yield f"<p>{escape(header.setup)}; {header.num_examples} examples a seed. kvreclaim {header.version}</p>"
    yield f"<p><code>{escape(header.command)}</code></p><p>{NOTE}</p>"
    for each in header.kv_formats:
        yield f"<p>{escape(f'{each.name} {each.bytes_per_token:.5g} bytes a token ({each.kernels})')}</p>"
    for (status, reason), cells in report.problems.items():
        yield f"<p><b>{status}</b>: {escape(', '.join(cells))}: {escape(reason)}</p>"
    for title, svg in _figures(report):
        if svg is not None:
            uri = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
            yield f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="{uri}">'
    for table in tables(report):
        rows = _row("th", table.columns) + "".join(_row("td", line) for line in table.lines)
        yield f"<h2>{escape(table.title)}</h2><div><table>{rows}</table></div>\n"


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>\n"


def _figures(report: EvalReport) -> Iterator[tuple[str, str | None]]:
    of_suites = [row for row in report.rows if row.task not in report.header.tasks]
    suites = report.model_copy(update={"rows": of_suites})
    yield "Means of suites against K/V bytes", charts.quality_chart(suites)
    yield "Quality against K/V bytes", charts.quality_chart(report)
    yield "Tokens generated", charts.trace_chart(report)
    yield "Blocks freed", charts.freed_chart(report)
    yield "Share of the prompt that the cache served, by turn", charts.turns_chart(report, "cached_by_turn")
    yield "Agreement with the full cache, by turn", charts.turns_chart(report, "agreement_by_turn")
    yield "Tokens per second", charts.speed_chart(report)
    for task in report.tasks:
        yield f"Position of the lost evidence: {task}", charts.loss_chart(report, task)
