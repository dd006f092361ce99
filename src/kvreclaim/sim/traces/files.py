"""Traces from files of four formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvreclaim.checks import is_int, require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.lengths import LONGEST, date_s, trace_rows
from kvreclaim.sim.request import SimRequest
from kvreclaim.sim.traces.trace import Trace

PIECE = 512
"""Tokens per hash id of Mooncake's and AIPerf's files."""
LATEST = 1e12
"""Maximum of a time, in seconds or milliseconds."""
Rows = list[tuple[int, dict[str, Any]]]
"""Requests of a file, with their line numbers."""
Turn = tuple[int | str | None, SimRequest, float]
"""Name of the session, request, and seconds from the previous answer of the session."""
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
OWN = ("arrival_s", "prompt_tokens", "output_tokens", "ids", "piece", "session", "think_s", "priority")


def read_trace(path: Path) -> Trace:
    """Read all requests of a file, by arrival, the first one at 0. The first line decides on the format.

    Raises: InvalidArgumentError.
    """
    rows = list(trace_rows(path))
    require(bool(rows), f"--trace {path} is empty; it must hold a request a line.", "trace")
    form = _format(rows[0][1])
    trace = FORMATS[form](rows)
    first = min(request.arrival_s for request in trace.requests)
    requests = [replace(request, arrival_s=request.arrival_s - first) for request in trace.requests]
    requests.sort(key=lambda request: request.arrival_s)
    return replace(trace, requests=requests, name=path.name, form=form)


def _format(row: Mapping[str, Any]) -> str:
    if all(isinstance(value, str | None) for value in row.values()):
        return "azure"
    if "prompt_tokens" in row:
        return "jsonl"
    return "aiperf" if row.keys() & {"session_id", "delay", "turns"} else "mooncake"


def _mooncake(rows: Rows) -> Trace:
    """timestamp (ms), input_length, output_length, hash_ids: PIECE tokens each, the last maybe fewer."""
    return Trace([_hashed(row, number) for number, row in rows], knows_content=True)


def _hashed(row: Mapping[str, Any], number: int) -> SimRequest:
    prompt, ids = _count(row, "input_length", number), _ids(row, "hash_ids", number)
    num_ids = -(-prompt // PIECE)
    require(
        len(ids) in (0, num_ids),
        f"line {number}: hash_ids has {len(ids)} entries for {prompt} tokens; ids of {PIECE} tokens each "
        f"would be {num_ids}. Write prompt_tokens, output_tokens, ids and piece for ids of another size.",
        "trace",
    )
    output = max(1, _count(row, "output_length", number, least=0))
    arrival = _number(row, "timestamp", number) / 1000
    return SimRequest(arrival, prompt, output, ids, PIECE, prompt if ids else 0)


def _azure(rows: Rows) -> Trace:
    """TIMESTAMP, ContextTokens, GeneratedTokens; nothing about content."""
    requests = []
    for number, row in rows:
        require(
            row.keys() >= {*AZURE},
            f"line 1: the columns are {', '.join(map(str, row))}; needed are {', '.join(AZURE)}.",
            "trace",
        )
        prompt, output = (_digits(row[name], name, number) for name in AZURE[1:])
        requests.append(SimRequest(_arrival(row["TIMESTAMP"], number), max(1, prompt), max(1, output)))
    return Trace(requests, knows_content=False)


def _arrival(text: object, number: int) -> float:
    try:
        return date_s(str(text))
    except ValueError:
        raise InvalidArgumentError(
            f"line {number}: TIMESTAMP is {text!r}; write 2023-11-16 18:17:03.979.", field="trace"
        ) from None


def _aiperf(rows: Rows) -> Trace:
    """Mooncake's fields, session_id, and delay (ms) from the session's previous answer."""
    turns: list[Turn] = []
    for number, row in rows:
        require(
            "input_length" in row,
            f"line {number} has no input_length; texts are not counted here: write the lengths in tokens.",
            "trace",
        )
        delay_s = _number({"delay": 0, **row}, "delay", number) / 1000
        turns.append((_name(row, "session_id", number), _hashed({"timestamp": 0, **row}, number), delay_s))
    return _conversations(turns, knows_content=True)


def _own(rows: Rows) -> Trace:
    """prompt_tokens, output_tokens, arrival_s; optional: ids and piece (the beginning of the prompt), session
    (its turns share their text; each arrives think_s after the previous answer), priority."""
    turns: list[Turn] = []
    for number, row in rows:
        strange = sorted(row.keys() - {*OWN})
        require(not strange, f"line {number} has {', '.join(strange)}; known are {', '.join(OWN)}.", "trace")
        prompt = _count(row, "prompt_tokens", number)
        piece = _count({"piece": PIECE, **row}, "piece", number)
        ids, session = _ids(row, "ids", number), _name(row, "session", number)
        request = SimRequest(
            _number({"arrival_s": 0.0, **row}, "arrival_s", number),
            prompt,
            _count(row, "output_tokens", number),
            ids,
            piece,
            min(prompt, len(ids) * piece),
            tail=None if session is None else ("session", session),
            priority=int(_value({"priority": 0, **row}, "priority", number, is_int, "an integer")),
        )
        turns.append((session, request, _number({"think_s": 0, **row}, "think_s", number)))
    knows = any(request.ids or session is not None for session, request, _ in turns)
    return _conversations(turns, knows_content=knows)


def _conversations(turns: Iterable[Turn], *, knows_content: bool) -> Trace:
    """Separate the first turn of each session, which arrives by itself, from the later ones."""
    alone: list[SimRequest] = []
    sessions: dict[int | str, list[SimRequest]] = {}
    for name, request, wait_s in turns:
        if name is None:
            alone.append(request)
            continue
        before = sessions.setdefault(name, [])
        arrival_s = wait_s if before else request.arrival_s
        number = before[0].session if before else len(sessions) - 1
        before.append(replace(request, arrival_s=arrival_s, session=number))
    later = {each[0].session: each[1:] for each in sessions.values()}
    return Trace([*alone, *(each[0] for each in sessions.values())], knows_content, later)


FORMATS: Mapping[str, Callable[[Rows], Trace]] = MappingProxyType(
    {"mooncake": _mooncake, "azure": _azure, "aiperf": _aiperf, "jsonl": _own}
)


def _value(row: Mapping[str, Any], name: str, number: int, ok: Callable[[Any], bool], what: str) -> Any:
    """Return the value of a field. Raises: InvalidArgumentError."""
    value = row.get(name)
    require(ok(value), f"line {number}: {name} is {value!r:.60}; it must be {what}.", "trace")
    return value


def _number(row: Mapping[str, Any], name: str, number: int) -> float:
    def ok(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LATEST

    return float(_value(row, name, number, ok, f"a number from 0 to {LATEST:g}"))


def _ids(row: Mapping[str, Any], name: str, number: int) -> tuple[Any, ...]:
    def ok(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(isinstance(each, int | str) for each in value)

    return tuple(_value({name: row.get(name) or ()}, name, number, ok, "a list of numbers or names"))


def _name(row: Mapping[str, Any], name: str, number: int) -> int | str | None:
    found: int | str | None = _value(
        row, name, number, lambda value: value is None or isinstance(value, int | str), "a number or a name"
    )
    return found


def _count(row: Mapping[str, Any], name: str, number: int, least: int = 1) -> int:
    what = f"an integer from {least} to {LONGEST}"
    return int(_value(row, name, number, lambda value: is_int(value) and least <= value <= LONGEST, what))


def _digits(text: str | None, name: str, number: int) -> int:
    def ok(value: Any) -> bool:
        return value is not None and value.strip().isdecimal() and len(value.strip()) <= len(str(LONGEST))

    return int(_value({name: text}, name, number, ok, "a number of tokens"))
