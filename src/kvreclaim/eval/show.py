"""The grid on a terminal: a progress bar, then a table for each task."""

from __future__ import annotations

from collections.abc import Iterator
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
from kvreclaim.eval.report import EvalReport
from kvreclaim.eval.tables import tables


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
    console.print(report.header.setup, style="bold")
    for each in tables(report):
        table = Table(title=escape(each.title), box=box.SIMPLE_HEAD)
        for i, heading in enumerate(each.columns):
            table.add_column(heading, justify="left" if i in each.words else "right")
        for line in each.lines:
            table.add_row(*map(escape, line))
        console.print(table)
    for (status, reason), cells in report.problems.items():
        style = {"error": "red", "refused": "yellow"}.get(status, "dim")
        console.print(f"{status}: {', '.join(cells)}: {reason}", style=style, markup=False)
