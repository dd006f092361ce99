"""Common parts of `kvreclaim bench` and of the benchmarks in benchmarks/."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreclaim.cli.config_options import usage_errors
from kvreclaim.cli.options import Figures
from kvreclaim.outputs import write_json

if TYPE_CHECKING:
    from rich.table import Table

Json = Figures


@contextmanager
def ready(threads: int) -> Iterator[None]:
    """Threads set, no progress bars, a caller's mistake in one sentence."""
    with usage_errors():
        import torch

        from kvreclaim.model.loader import hide_progress_bars

        torch.set_num_threads(threads)
        hide_progress_bars()
        yield


def publish(
    rows: Sequence[dict[str, Any]], tables: Iterable[Table], json_file: Path | None, **extra: Any
) -> None:
    """Print the tables and write the file, if one is named. extra: what it holds beside the rows."""
    from kvreclaim.bench import common

    for made in tables:
        common.show(made)
    if json_file is not None:
        write_json(json_file, common.report(rows, command_line(), **extra))


def command_line() -> str:
    """The command line as it was given."""
    program = Path(sys.argv[0])
    is_module = program.name == "__main__.py"
    names = ["python", "-m", program.parent.name] if is_module else [program.name]
    return shlex.join([*names, *sys.argv[1:]])
