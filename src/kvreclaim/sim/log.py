"""Requests from a server's log: when they arrived, got their first token, and ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from kvreclaim.checks import parse_json
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.sim.request import SimRequest

LINES = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
FORMATS = (
    f"a file of vllm bench serve --save-result --save-detailed ({', '.join(LISTS)}), or JSON lines with "
    f"{', '.join(LINES)}"
)


@dataclass(frozen=True, slots=True)
class Logged:
    """A request that a server has answered. Times in seconds since the first one came."""

    arrival_s: float
    num_prompt: int
    num_output: int
    first_token_s: float
    end_s: float

    @property
    def request(self) -> SimRequest:
        return SimRequest(self.arrival_s, self.num_prompt, self.num_output)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens behind the first; None: there is only one."""
        return (self.end_s - self.first_token_s) / (self.num_output - 1) if self.num_output > 1 else None


def read_log(path: Path) -> list[Logged]:
    """In the order of their arrival. Raises: InvalidArgumentError for what is none of FORMATS."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read ({error}); pass {FORMATS}.", field="log") from None
    try:
        whole = parse_json(text)
    except ValueError:
        whole = None
    try:
        if isinstance(whole, dict) and "start_times" in whole:
            rows = _of_lists(whole)
        else:
            rows = [_of_line(parse_json(line)) for line in text.splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidArgumentError(
            f"{path} is no log of requests ({what}); pass {FORMATS}.", field="log"
        ) from None
    return _checked(rows, path)


def _of_line(row: Mapping[str, Any]) -> Logged:
    prompt, output, queued, first, last = (row[name] for name in LINES)
    return Logged(float(queued), int(prompt), int(output), float(first), float(last))


def _of_lists(whole: Mapping[str, Any]) -> list[Logged]:
    columns = zip(*(whole[name] for name in LISTS), strict=True)
    return [
        Logged(float(start), int(prompt), int(output), start + ttft, start + ttft + sum(gaps))
        for prompt, output, start, ttft, gaps in columns
        if output
    ]


def _checked(rows: Iterable[Logged], path: Path) -> list[Logged]:
    found = sorted(rows, key=lambda row: row.arrival_s)
    if not found:
        raise InvalidArgumentError(f"{path} has no requests; pass {FORMATS}.", field="log")
    start = found[0].arrival_s
    for row in found:
        times = (row.arrival_s, row.first_token_s, row.end_s)
        if not all(map(isfinite, times)) or not row.arrival_s <= row.first_token_s <= row.end_s:
            raise InvalidArgumentError(
                f"{path}: a request that came at {row.arrival_s} got its first token at {row.first_token_s} "
                f"and its last at {row.end_s}; times must be seconds of one clock, in this order.",
                field="log",
            )
        if row.num_prompt < 1 or row.num_output < 1:
            raise InvalidArgumentError(
                f"{path}: a request has {row.num_prompt} tokens in and {row.num_output} out; leave out those "
                "that were not answered.",
                field="log",
            )
    return [
        Logged(
            row.arrival_s - start,
            row.num_prompt,
            row.num_output,
            row.first_token_s - start,
            row.end_s - start,
        )
        for row in found
    ]
