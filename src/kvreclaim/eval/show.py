"""The grid on a terminal: a progress bar, then a table for each task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvreclaim.eval.compare import OnStart
from kvreclaim.eval.grid import OnProgress
from kvreclaim.eval.report import HEADINGS as MIX_HEADINGS
from kvreclaim.eval.report import EvalReport, EvalRow, best_mix_lines, mixes

MEBI = 2**20


@contextmanager
def progress_bar(console: Console) -> Iterator[OnStart]:
    """Show finished and total examples, with the current work; removed at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True) as progress:

        def on_start(num_examples: int) -> OnProgress:
            task = progress.add_task("evaluate", total=num_examples)
            return lambda label, advance: progress.update(
                task, description=escape(f"{label:<36.36}"), advance=advance
            )

        yield on_start


def show_estimate(console: Console, seconds: float) -> None:
    """Print the remaining time, estimated from the first example."""
    console.print(
        f"about {timedelta(seconds=round(seconds))} left, if all examples take as long as the first"
    )


def show_report(console: Console, report: EvalReport) -> None:
    """Print a table for each task, then refusals and failures with their reasons."""
    head = report.header
    window = f"interval {head.interval}, {head.sinks} sinks, {head.recent} recent tokens"
    setup = head.url or f"{head.dtype} on {head.device}; {window}"
    console.print(f"{head.model}, {setup}; seeds {', '.join(map(str, head.seeds))}", style="bold")
    for task in report.tasks:
        console.print(task_table(report, task))
    for task in mixes(report):
        console.print(mix_table(report, task))
    for (status, reason), cells in report.problems.items():
        style = {"error": "red", "refused": "yellow"}.get(status, "dim")
        console.print(f"{status}: {', '.join(cells)}: {reason}", style=style, markup=False)


def task_table(report: EvalReport, task: str) -> Table:
    """One line for each policy and budget."""
    rows = report.of(task)
    first = next((row for row in rows if row.num_examples), rows[0])

    def speed(row: EvalRow) -> float | None:
        return row.tokens_per_s if row.speed_of == first.speed_of else None

    columns: dict[str, Callable[[EvalRow], str]] = {
        "policy": lambda row: escape(row.name),
        "keeps": lambda row: row.keeps,
        "tokens": lambda row: _number(row.budget, 0),
        first.metric.value: lambda row: _number(row.value) if row.status == "ok" else row.status,
        "95 % CI": lambda row: f"{row.ci95[0]:.3f}..{row.ci95[1]:.3f}" if row.ci95 else "-",
        "of full": lambda row: _number(row.of_full),
        "KV MiB": lambda row: _number(row.kv_bytes and row.kv_bytes / MEBI, 2),
        "freed": lambda row: _number(row.blocks_freed, 0),
        "reclaim": lambda row: _number(row.reclaim_efficiency, 2),
        "tok/s": lambda row: _number(speed(row), 0),
    }
    extras = report.extras(task)
    table = Table(title=escape(f"{task} ({report.summary(task)})"), box=box.SIMPLE_HEAD)
    for i, heading in enumerate((*columns, *extras)):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        further = (_number(row.extra.get(name)) for name in extras)
        table.add_row(*(cell(row) for cell in columns.values()), *further)
    return table


def mix_table(report: EvalReport, task: str) -> Table:
    """The best mix: for a number of bytes, take the last line within it."""
    table = Table(title=escape(f"{task}: best mix for a byte budget"), box=box.SIMPLE_HEAD)
    for i, heading in enumerate(MIX_HEADINGS):
        table.add_column(
            heading.format(metric=report.of(task)[0].metric.value), justify="left" if i == 2 else "right"
        )
    for line in best_mix_lines(report, task):
        table.add_row(*map(escape, line))
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
