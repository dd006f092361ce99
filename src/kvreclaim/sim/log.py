"""Requests of a server's log: arrivals, first tokens and ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from kvreclaim.checks import parse_json, require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.sim.request import RequestRecord

LINES = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
FORMATS = (
    f"a file of vllm bench serve --save-result --save-detailed ({', '.join(LISTS)}), or JSON lines with "
    f"{', '.join(LINES)}"
)


def read_log(path: Path) -> list[RequestRecord]:
    """Read a log, by arrival. Raises: InvalidArgumentError for a file of no known format."""
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


def _of_line(row: Mapping[str, Any]) -> RequestRecord:
    prompt, output, queued, first, last = (row[name] for name in LINES)
    return _record(float(queued), int(prompt), int(output), float(first), float(last))


def _of_lists(whole: Mapping[str, Any]) -> list[RequestRecord]:
    columns = zip(*(whole[name] for name in LISTS), strict=True)
    return [
        _record(float(start), int(prompt), int(output), start + ttft, start + ttft + sum(gaps))
        for prompt, output, start, ttft, gaps in columns
        if output
    ]


def _record(arrival_s: float, prompt: int, output: int, first_s: float, end_s: float) -> RequestRecord:
    return RequestRecord(0, 0, arrival_s, prompt, output, first_token_s=first_s, end_s=end_s)


def _checked(rows: list[RequestRecord], path: Path) -> list[RequestRecord]:
    """Sort the requests and shift their times, so that the first one arrives at 0."""
    found = []
    start = min((row.arrival_s for row in rows), default=None)
    if start is None:
        raise InvalidArgumentError(f"{path} has no requests; pass {FORMATS}.", field="log")
    for number, row in enumerate(sorted(rows, key=lambda row: row.arrival_s)):
        first_s, end_s = row.first_token_s, row.end_s
        assert first_s is not None
        assert end_s is not None
        times = (row.arrival_s, first_s, end_s)
        require(
            all(map(isfinite, times)) and row.arrival_s <= first_s <= end_s,
            f"{path}: a request that came at {row.arrival_s} got its first token at {first_s} and its last "
            f"at {end_s}; times must be seconds of one clock, in this order.",
            "log",
        )
        require(
            row.num_prompt >= 1 and row.num_output >= 1,
            f"{path}: a request has {row.num_prompt} tokens in and {row.num_output} out; leave out those "
            "that were not answered.",
            "log",
        )
        arrival_s, first_s, end_s = (each - start for each in times)
        found.append(replace(row, number=number, arrival_s=arrival_s, first_token_s=first_s, end_s=end_s))
    return found
