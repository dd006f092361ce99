"""Parts shared by benchmarks: machine facts, alternating rounds, medians, tables, the JSON file."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Formatter
from time import perf_counter
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

Name = TypeVar("Name")
Result = TypeVar("Result")
Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]
"""Cells by heading: a format with the row's keys in it, which is "-" if the row lacks one of them, or a
function of the row."""
PACKAGES = ("kvreclaim", "torch", "transformers", "numpy", "triton")
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
PIPE_WIDTH = 160


def machine() -> Row:
    """CPU, cores, the vector extensions that decide kernel speed, memory in GiB, GPU if there is one."""
    import torch

    cpu, flags = _cpu_info()
    facts: Row = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": platform.platform(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_info() -> tuple[str, set[str]]:
    """Model name and feature flags; empty flags if the system does not report them."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name") or platform.processor() or platform.machine(), set(flags.split())


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def commit() -> str | None:
    """The checkout's commit, with "+" if files differ from it; None outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def report(rows: Sequence[Row], command: str, **extra: Any) -> Row:
    """Build the file that every benchmark writes: machine, versions, commit, command, extra fields, rows."""
    return {
        "machine": machine(),
        "versions": versions() | extra.pop("peer_versions", {}),
        "commit": commit(),
        "command": command,
        **extra,
        "rows": list(rows),
    }


def alternate(runs: Mapping[Name, Callable[[], Result]], rounds: int) -> dict[Name, list[Result]]:
    """Call every run once a round, starting each round with the next one: results by name."""
    names = list(runs)
    results: dict[Name, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            results[name].append(runs[name]())
    return results


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = perf_counter()
    work()
    return perf_counter() - start


def spread(values: Sequence[float]) -> float:
    """Largest over smallest."""
    return max(values) / min(values)


def table(title: str, headings: Sequence[str], *, text_columns: int = 1) -> Table:
    """A table with leading columns of words and further columns of numbers."""
    made = Table(title=title)
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="left" if i < text_columns else "right")
    return made


def cells(columns: Columns, rows: Iterable[Row]) -> list[list[str]]:
    """A line for each row."""
    return [[_cell(column, row) for column in columns.values()] for row in rows]


def _cell(column: str | Callable[[Row], str], row: Row) -> str:
    if callable(column):
        return column(row)
    fields = [name for _, name, _, _ in Formatter().parse(column) if name]
    return "-" if any(row.get(name) is None for name in fields) else column.format_map(row)


def sheet(title: str, columns: Columns, rows: Iterable[Row], *, text_columns: int = 1) -> Table:
    """Make a table of these columns: see `table`."""
    made = table(title, list(columns), text_columns=text_columns)
    for line in cells(columns, rows):
        made.add_row(*line)
    return made


def markdown(headings: Collection[str], lines: Iterable[Iterable[str]]) -> str:
    """Format a table for a document."""
    lines = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(made: Table) -> None:
    wide_console().print(made)


def wide_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal; without a terminal, wide enough for every table."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PIPE_WIDTH)


def text(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """Format a number for a table; "-" for None."""
    return "-" if value is None else f"{value:,.{digits}f}{suffix}"
