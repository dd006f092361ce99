"""Lengths and arrivals of a trace's requests: Azure's table, or JSON lines such as Mooncake's."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreclaim.checks import parse_json, require
from kvreclaim.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROMPT = ("input_length", "ContextTokens", "input_toks", "input_tokens", "prompt_tokens")
OUTPUT = ("output_length", "GeneratedTokens", "output_toks", "output_tokens", "completion_tokens")
SECONDS, MILLISECONDS, DATE = ("arrival_s", "arrival_time"), "timestamp", "TIMESTAMP"
LONGEST = 1 << 40


def trace_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the requests of a file with their line numbers: JSON objects, one a line, or the rows of a CSV
    table, which are text. Blank lines are not counted. Raises: InvalidArgumentError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [line for line in text.splitlines() if line.strip()]
        if lines and not lines[0].lstrip().startswith("{"):
            yield from enumerate(csv.DictReader(lines), 2)
            return
    except (OSError, ValueError, csv.Error) as error:
        raise InvalidArgumentError(
            f"--trace {str(path)!r} cannot be read ({error}); pass Azure's CSV, or JSON lines with "
            f"{PROMPT[0]} and {OUTPUT[0]}.",
            field="trace",
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise InvalidArgumentError(f"line {number} is no JSON: {error}.", field="trace") from None
        require(isinstance(row, dict), f"line {number} is no JSON object; write one a line.", "trace")
        yield number, row


def date_s(text: str) -> float:
    """Seconds of a date like Azure's, 2023-11-16 18:17:03.9799600, in UTC. Raises: ValueError."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Lengths of N requests in order, without those that have no answer.

    prompts, outputs: [N] tokens
    arrivals: [N] seconds since the first; None if the file has no times
    """

    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    arrivals: NDArray[np.float64] | None = None

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last. Raises: InvalidArgumentError if it is not known."""
        if self.arrivals is None or len(self.arrivals) < 2 or self.arrivals.max() <= 0:
            raise InvalidArgumentError("the trace does not say when its requests came, so it offers no load.")
        return float(self.arrivals.max())


def read_lengths(path: Path, first: int | None = None) -> Lengths:
    """Read the first requests of a file, or all. Raises: InvalidArgumentError."""
    import numpy as np

    rows = [_row(path, number, row) for number, row in islice(trace_rows(path), first)]
    answered = [row for row in rows if row[1] > 0]
    if not answered:
        raise InvalidArgumentError(f"--trace {str(path)!r} has no request with an answer.", field="trace")
    times = [row[2] for row in answered]
    known = [time for time in times if time is not None]
    arrivals = np.array(known) - min(known) if len(known) == len(times) else None
    prompts, outputs = (np.array([row[i] for row in answered], dtype=np.int64) for i in (0, 1))
    return Lengths(prompts, outputs, arrivals)


def _row(path: Path, number: int, row: Mapping[str, Any]) -> tuple[int, int, float | None]:
    try:
        prompt, output = (int(next(row[key] for key in keys if key in row)) for keys in (PROMPT, OUTPUT))
        if not (1 <= prompt <= LONGEST and 0 <= output <= LONGEST):
            raise ValueError("a length is below 0, or of no sequence")
        return prompt, output, _time(row)
    except (StopIteration, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"--trace {str(path)!r}, line {number} has no lengths ({str(row)[:80]}); write "
            f"{PROMPT[0]} and {OUTPUT[0]}, or the columns of Azure's traces.",
            field="trace",
        ) from error


def _finite(value: float) -> float:
    if not isfinite(value):
        raise ValueError(f"{value} is no time")
    return value


def _time(row: Mapping[str, Any]) -> float | None:
    for key in SECONDS:
        if row.get(key) is not None:
            return _finite(float(row[key]))
    if row.get(MILLISECONDS) is not None:
        return _finite(float(row[MILLISECONDS])) * 1e-3
    return date_s(str(row[DATE])) if row.get(DATE) else None
