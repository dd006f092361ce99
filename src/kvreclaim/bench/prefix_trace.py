"""Traces of requests whose prompts are given as hashes of blocks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreclaim.checks import is_int, parse_json, require
from kvreclaim.errors import InvalidArgumentError

TOKENS_PER_HASH = 512


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """block_ids: one per 512 tokens of the prompt, the last one for what is left of it; equal ids stand
    for equal tokens after an equal prefix. arrival_s: seconds since the beginning of the trace."""

    arrival_s: float
    block_ids: tuple[int, ...]


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a trace in the format of Mooncake: one JSON object per line with hash_ids and
    timestamp (milliseconds).

    Raises: InvalidArgumentError for a file that is missing, has no hashes or is malformed.
    """
    require(
        os.path.isfile(path), f"--trace is {str(path)!r}, which is no file; name a trace of block hashes."
    )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"--trace {str(path)!r} cannot be read ({error}); name a trace of block hashes."
        ) from error
    require(bool(lines), f"--trace {str(path)!r} is empty; name a trace of block hashes.")
    if not lines[0].lstrip().startswith("{"):
        raise InvalidArgumentError(
            f"--trace {str(path)!r} begins with {lines[0][:60]!r}, which is no JSON object: a table of "
            "lengths, such as the Azure traces, does not say which prompts share a prefix, so it has no hit "
            "rate; use a trace with hash_ids, such as Mooncake's."
        )
    requests = [_request(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    require(
        any(request.block_ids for request in requests), f"--trace {str(path)!r} has no block in any request."
    )
    return requests


def _request(path: Path, number: int, line: str) -> TracedRequest:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{path}, line {number}: {error}; each line is one JSON object."
        ) from error
    fields = row if isinstance(row, dict) else {}
    ids: Any = fields.get("hash_ids")
    valid = isinstance(ids, list) and all(is_int(block) and -(2**63) < block < 2**63 for block in ids)
    require(valid, f"{path}, line {number}: hash_ids is {ids!r}; it must be a list of 64-bit integers.")
    milliseconds: Any = fields.get("timestamp", 0)
    timed = (is_int(milliseconds) or isinstance(milliseconds, float)) and abs(milliseconds) < 1e18
    require(timed, f"{path}, line {number}: timestamp is {milliseconds!r}; it must be a number.")
    return TracedRequest(milliseconds / 1000, tuple(ids))
