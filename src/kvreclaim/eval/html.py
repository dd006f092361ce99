"""The report as one self-contained HTML file."""

from __future__ import annotations

import base64
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from kvreclaim.eval import charts
from kvreclaim.eval.report import HEADINGS, EvalReport, best_mix_lines, mixes
from kvreclaim.outputs import write_text

TEMPLATE = "report.html.jinja"


def write_html(report: EvalReport, path: Path) -> None:
    """Write tables, charts (inlined SVG) and the setup."""
    write_text(path, render(report))


def render(report: EvalReport) -> str:
    environment = Environment(
        loader=PackageLoader("kvreclaim.eval", "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    environment.filters["mib"] = _mib
    of_suites = [row for row in report.rows if row.task not in report.header.tasks]
    suites = report.model_copy(update={"rows": of_suites})
    figures = [
        ("Means of suites against K/V bytes", charts.quality_chart(suites)),
        ("Quality against K/V bytes", charts.quality_chart(report)),
        ("Tokens generated", charts.trace_chart(report)),
        ("Blocks freed", charts.freed_chart(report)),
        ("Share of the prompt that the cache served, by turn", charts.turns_chart(report, "cached_by_turn")),
        ("Agreement with the full cache, by turn", charts.turns_chart(report, "agreement_by_turn")),
        ("Tokens per second", charts.speed_chart(report)),
        *(
            (f"Where the lost evidence stood: {task}", charts.loss_chart(report, task))
            for task in report.tasks
        ),
    ]
    return environment.get_template(TEMPLATE).render(
        header=report.header,
        tasks=[(task, report.of(task), report.summary(task)) for task in report.tasks],
        extras={task: report.extras(task) for task in report.tasks},
        mixes={task: best_mix_lines(report, task) for task in mixes(report)},
        mix_headings=HEADINGS,
        problems=report.problems,
        figures=[(title, _data_uri(svg)) for title, svg in figures if svg is not None],
    )


def _data_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _mib(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.2f}"
