"""Lengths and arrivals of a trace's requests: Azure's table, or JSON lines such as Mooncake's."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvreclaim.checks import parse_json
from kvreclaim.errors import InvalidArgumentError

PROMPT = ("input_length", "ContextTokens", "input_toks", "input_tokens", "prompt_tokens")
OUTPUT = (
    "output_length",
    "GeneratedTokens",
    "output_toks",
    "output_tokens",
    "completion_tokens",
)
SECONDS, MILLISECONDS, DATES = ("arrival_s", "arrival_time"), ("timestamp",), ("TIMESTAMP",)
LONGEST = 1 << 40
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Lengths of N requests in order: prompts and outputs [N] tokens, arrivals [N] seconds since the first,
    or None where the file does not say when they came. Requests without an answer are left out."""

    prompts: Integers
    outputs: Integers
    arrivals: NDArray[np.float64] | None = None

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last. Raises: InvalidArgumentError where none are known."""
        if self.arrivals is None or len(self.arrivals) < 2 or self.arrivals.max() <= 0:
            raise InvalidArgumentError("the trace does not say when its requests came, so it offers no load.")
        return float(self.arrivals.max())


def read_lengths(path: Path, first: int | None = None) -> Lengths:
    """first: only so many requests of the file. Raises: InvalidArgumentError."""
    rows = []
    for number, row in enumerate(_rows(path), 1):
        rows.append(_row(path, number, row))
        if first is not None and number == first:
            break
    answered = [row for row in rows if row[1] > 0]
    if not answered:
        raise InvalidArgumentError(f"--trace {str(path)!r} has no request with an answer.", field="trace")
    times = [row[2] for row in answered]
    known = [time for time in times if time is not None]
    arrivals = np.array(known) - min(known) if len(known) == len(times) else None
    prompts, outputs = (np.array([row[i] for row in answered], dtype=np.int64) for i in (0, 1))
    return Lengths(prompts, outputs, arrivals)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            start = file.readline()
            file.seek(0)
            if start.lstrip().startswith("{"):
                yield from (parse_json(line) for line in file if line.strip())
            else:
                yield from csv.DictReader(file)
    except (OSError, ValueError, csv.Error) as error:
        raise InvalidArgumentError(
            f"--trace {str(path)!r} cannot be read ({error}); pass Azure's CSV, or JSON lines with "
            f"{PROMPT[0]} and {OUTPUT[0]}.",
            field="trace",
        ) from error


def _row(path: Path, number: int, row: Mapping[str, Any]) -> tuple[int, int, float | None]:
    try:
        prompt, output = (int(next(row[key] for key in keys if key in row)) for keys in (PROMPT, OUTPUT))
        if not (1 <= prompt <= LONGEST and 0 <= output <= LONGEST):
            raise ValueError("a length is below 0, or of no sequence")
        return prompt, output, _time(row)
    except (StopIteration, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"--trace {str(path)!r}, request {number} has no lengths ({str(row)[:80]}); write "
            f"{PROMPT[0]} and {OUTPUT[0]}, or the columns of Azure's traces.",
            field="trace",
        ) from error


def _finite(value: float) -> float:
    if not isfinite(value):
        raise ValueError(f"{value} is no time")
    return value


def _time(row: Mapping[str, Any]) -> float | None:
    for keys, scale in ((SECONDS, 1.0), (MILLISECONDS, 1e-3)):
        for key in keys:
            if row.get(key) is not None:
                return _finite(float(row[key])) * scale
    for key in DATES:
        if row.get(key):
            return datetime.fromisoformat(str(row[key])[:26]).timestamp()
    return None
