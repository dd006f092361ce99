"""Requests from files: what each format says, and what it leaves open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvreclaim.checks import check_choice, is_int, require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.lengths import LONGEST, date_s, trace_rows
from kvreclaim.sim.request import SimRequest
from kvreclaim.sim.traces.trace import Trace

MOONCAKE_PIECE = 512
LATEST = 1e12
"""Maximum of a time, in seconds or milliseconds."""
Rows = list[tuple[int, dict[str, Any]]]
"""Requests of a file, with their line numbers."""


def read_trace(path: Path, form: str = "auto", *, piece: int = MOONCAKE_PIECE) -> Trace:
    """All requests of a file in the order of their arrival, the first one at 0.

    form:  mooncake, azure, aiperf, jsonl (our own); auto: as the first line looks
    piece: tokens that a hash id of mooncake and aiperf stands for

    Raises: InvalidArgumentError.
    """
    check_choice("format", form, ("auto", *FORMATS))
    rows = list(trace_rows(path))
    require(bool(rows), f"--trace {path} is empty; it must hold a request a line.", "trace")
    form = _guess(rows[0][1]) if form == "auto" else form
    trace = FORMATS[form](rows, piece)
    first = min(request.arrival_s for request in trace.requests)
    requests = [replace(request, arrival_s=request.arrival_s - first) for request in trace.requests]
    requests.sort(key=lambda request: request.arrival_s)
    return replace(trace, requests=requests, name=path.name, form=form)


def _guess(row: Mapping[str, Any]) -> str:
    if all(isinstance(value, str | None) for value in row.values()):
        return "azure"
    if "prompt_tokens" in row:
        return "jsonl"
    return "aiperf" if row.keys() & {"session_id", "delay", "turns"} else "mooncake"


def _mooncake(rows: Rows, piece: int) -> Trace:
    """timestamp (ms), input_length, output_length, hash_ids: each of `piece` tokens, the last maybe fewer."""
    return Trace([_hashed(row, number, piece) for number, row in rows], knows_content=True)


def _hashed(row: Mapping[str, Any], number: int, piece: int) -> SimRequest:
    prompt, ids = _count(row, "input_length", number), _ids(row, "hash_ids", number)
    require(
        len(ids) in (0, -(-prompt // piece)),
        f"line {number}: hash_ids has {len(ids)} entries for "
        f"{prompt} tokens; ids of {piece} tokens each would be {-(-prompt // piece)}; pass --piece.",
        "trace",
    )
    output = max(1, _count(row, "output_length", number, least=0))
    arrival = _number(row, "timestamp", number) / 1000
    return SimRequest(arrival, prompt, output, ids, piece, prompt if ids else 0)


def _azure(rows: Rows, piece: int) -> Trace:
    """TIMESTAMP, ContextTokens, GeneratedTokens; nothing about content."""
    asked = []
    for number, row in rows:
        require(
            row.keys() >= {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
            f"line 1: the columns are {', '.join(map(str, row))}; needed are TIMESTAMP, ContextTokens and "
            "GeneratedTokens.",
            "trace",
        )
        prompt, output = (_digits(row[name], name, number) for name in ("ContextTokens", "GeneratedTokens"))
        asked.append(SimRequest(_arrival(row["TIMESTAMP"], number), max(1, prompt), max(1, output)))
    return Trace(asked, knows_content=False)


def _arrival(text: object, number: int) -> float:
    try:
        return date_s(str(text))
    except ValueError:
        raise InvalidArgumentError(
            f"line {number}: TIMESTAMP is {text!r}; write 2023-11-16 18:17:03.979.", field="trace"
        ) from None


def _aiperf(rows: Rows, piece: int) -> Trace:
    """Like mooncake, with session_id and delay (ms): a session's next turn comes so long after the answer."""
    turns: dict[Any, list[SimRequest]] = {}
    alone = []
    for number, row in rows:
        require(
            "input_length" in row,
            f"line {number} has no input_length; texts are not counted here: write the lengths in tokens.",
            "trace",
        )
        asked = _hashed({"timestamp": 0, **row}, number, piece)
        if "session_id" not in row:
            alone.append(asked)
            continue
        session = turns.setdefault(_name(row, "session_id", number), [])
        if session:
            asked = replace(asked, arrival_s=_number({"delay": 0, **row}, "delay", number) / 1000)
        session.append(replace(asked, session=list(turns).index(row["session_id"])))
    firsts = [session[0] for session in turns.values()]
    later = {session[0].session: session[1:] for session in turns.values()}
    return Trace([*alone, *firsts], knows_content=True, later=later)


def _own(rows: Rows, piece: int) -> Trace:
    """prompt_tokens, output_tokens, arrival_s; optional: ids and piece (what the prompt begins with), session
    (turns of one share their text; each comes think_s after the last answer), priority."""
    turns: dict[Any, list[SimRequest]] = {}
    alone, knows = [], False
    for number, row in rows:
        strange = sorted(row.keys() - _OWN)
        require(not strange, f"line {number} has {', '.join(strange)}; known are {', '.join(_OWN)}.", "trace")
        prompt = _count(row, "prompt_tokens", number)
        size = _count({"piece": piece, **row}, "piece", number)
        ids, session = _ids(row, "ids", number), _name(row, "session", number)
        asked = SimRequest(
            _number(row, "arrival_s", number) if "arrival_s" in row else 0.0,
            prompt,
            _count(row, "output_tokens", number),
            ids,
            size,
            min(prompt, len(ids) * size),
            tail=None if session is None else ("session", session),
            priority=_priority(row, number),
        )
        knows = knows or bool(ids) or session is not None
        if session is None:
            alone.append(asked)
            continue
        before = turns.setdefault(session, [])
        if before:
            asked = replace(asked, arrival_s=_number({"think_s": 0, **row}, "think_s", number))
        before.append(replace(asked, session=list(turns).index(session)))
    later = {each[0].session: each[1:] for each in turns.values()}
    return Trace([*alone, *(each[0] for each in turns.values())], knows_content=knows, later=later)


_OWN = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "ids",
    "piece",
    "session",
    "think_s",
    "priority",
)
FORMATS: Mapping[str, Callable[[Rows, int], Trace]] = MappingProxyType(
    {"mooncake": _mooncake, "azure": _azure, "aiperf": _aiperf, "jsonl": _own}
)


def _number(row: Mapping[str, Any], name: str, number: int) -> float:
    value = row.get(name)
    require(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LATEST,
        f"line {number}: {name} is {value!r}; it must be a number from 0 to {LATEST:g}.",
        "trace",
    )
    assert isinstance(value, int | float)
    return float(value)


def _ids(row: Mapping[str, Any], name: str, number: int) -> tuple[Any, ...]:
    value = row.get(name) or ()
    require(
        isinstance(value, list | tuple) and all(isinstance(each, int | str) for each in value),
        f"line {number}: {name} is {str(value)[:60]!r}; it must be a list of numbers or names.",
        "trace",
    )
    return tuple(value)


def _name(row: Mapping[str, Any], name: str, number: int) -> int | str | None:
    value = row.get(name)
    require(
        value is None or isinstance(value, int | str),
        f"line {number}: {name} is {str(value)[:60]!r}; it must be a number or a name.",
        "trace",
    )
    return value


def _priority(row: Mapping[str, Any], number: int) -> int:
    value: Any = row.get("priority", 0)
    require(is_int(value), f"line {number}: priority is {value!r}; it must be an integer.", "trace")
    return int(value)


def _count(row: Mapping[str, Any], name: str, number: int, least: int = 1) -> int:
    value: Any = row.get(name)
    require(
        is_int(value) and least <= value <= LONGEST,
        f"line {number}: {name} is {value!r}; it must be an integer from {least} to {LONGEST}.",
        "trace",
    )
    return int(value)


def _digits(text: str | None, name: str, number: int) -> int:
    require(
        text is not None and text.strip().isdecimal() and len(text.strip()) <= len(str(LONGEST)),
        f"line {number}: {name} is {text!r}; it must be a number of tokens.",
        "trace",
    )
    return int(str(text))
