"""The report's tables as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvreclaim.eval.report import EvalReport, EvalRow, frontier

MEBI = 2**20
Cell = Callable[[EvalRow], str]


@dataclass(frozen=True, slots=True)
class ReportTable:
    """columns: headings; words: the columns that are left-aligned"""

    title: str
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]]
    words: frozenset[int] = frozenset({0})


def tables(report: EvalReport) -> Iterator[ReportTable]:
    """A table for each task, then the best mix of each task with several formats."""
    for task in report.tasks:
        yield task_table(report, task)
    for task in mixes(report):
        yield mix_table(report, task)


def task_table(report: EvalReport, task: str) -> ReportTable:
    """One line for each policy and budget."""
    rows = report.of(task)
    first = next((row for row in rows if row.num_examples), rows[0])

    columns: dict[str, Cell] = {
        "policy": lambda row: row.name,
        "keeps": lambda row: row.keeps,
        "tokens": lambda row: _number(row.budget, 0),
        first.metric.value: lambda row: _number(row.value) if row.status == "ok" else row.status,
        "95 % CI": _interval,
        "of full": lambda row: _number(row.of_full),
        "KV MiB": lambda row: _number(row.kv_bytes and row.kv_bytes / MEBI, 2),
        "freed": lambda row: _number(row.blocks_freed, 0),
        "reclaim": lambda row: _number(row.reclaim_efficiency, 2),
        "tok/s": lambda row: _number(row.tokens_per_s if row.speed_of == first.speed_of else None, 0),
        **{name: lambda row, name=name: _number(row.extra.get(name)) for name in report.extras(task)},  # type: ignore[misc]
    }
    lines = [tuple(cell(row) for cell in columns.values()) for row in rows]
    return ReportTable(f"{task} ({report.summary(task)})", tuple(columns), lines)


def mixes(report: EvalReport) -> list[str]:
    """Tasks with several formats, for which a best mix is shown."""
    return [task for task in report.tasks if len({row.kv_cache_dtype for row in report.of(task)}) > 1]


def mix_table(report: EvalReport, task: str) -> ReportTable:
    """The frontier's rows: for a number of bytes, take the last line within it. Fewer bytes: than the full
    cache in the model's own dtype."""
    whole = report.header.kv_bytes_per_token
    columns: dict[str, Cell] = {
        "KiB a token": lambda row: f"{(row.bytes_per_token or 0.0) / 1024:.3g}",
        "fewer bytes": lambda row: f"{whole / (row.bytes_per_token or 1.0):.1f} ×",
        "best mix": lambda row: row.mix,
        report.of(task)[0].metric.value: lambda row: _number(row.value),
        "95 % CI": _interval,
        "of full": lambda row: _number(row.of_full),
    }
    lines = [tuple(cell(row) for cell in columns.values()) for row in frontier(report.of(task))]
    return ReportTable(f"{task}: best mix for a byte budget", tuple(columns), lines, frozenset({2}))


def _interval(row: EvalRow) -> str:
    return "-" if row.ci95 is None else f"{row.ci95[0]:.3f}..{row.ci95[1]:.3f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
