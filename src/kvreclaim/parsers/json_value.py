"""JSON texts as values, where numbers may be larger than any float."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from pydantic_core import from_json

from kvreclaim.parsers.json_object import JsonObject

LONG = 308
"""Digits of an integer that a float holds for certain."""
LARGE = re.compile(rf"[eE]\+?\d{{3}}|\d{{{LONG}}}")
"""Finds numbers that may be beyond floats."""
_members = json.JSONDecoder(parse_int=str, parse_float=str)


def json_value(text: str) -> Any:
    """Parse a JSON text. A number beyond floats, such as 1e999, becomes the largest of its sign: infinity
    could not be written as JSON.

    Raises: ValueError for invalid or too deep JSON.
    """
    if LARGE.search(text) is None:
        return from_json(text, allow_inf_nan=False)
    framed, found = f'{{"":{text}}}', JsonObject()
    if found.feed(framed) != len(framed) or not found.done:
        raise ValueError("no JSON")
    return json.loads(text, parse_int=_integer, parse_float=_float)


def json_object(text: str) -> dict[str, Any] | None:
    """Parse the object of a call's arguments; no text, or null, is an empty one.

    None: not a JSON object, such as arguments that max_tokens cut off.
    """
    try:
        value = json_value(text) if text.strip() else None
    except ValueError:
        return None
    return {} if value is None else value if isinstance(value, dict) else None


def json_so_far(text: str) -> dict[str, Any]:
    """Parse the beginning of an object's JSON, as Anthropic's client does: without incomplete texts, escapes
    and names. An integer of more digits than Python reads hides everything."""
    try:
        found = json.dumps(from_json(text, allow_partial=True) if text else {})
    except ValueError:
        return {}
    value: dict[str, Any] = json.loads(found, parse_int=_integer, parse_constant=_float)
    return value


def members(text: str) -> dict[str, str]:
    """Return the members of an object by name, each as its own JSON text. text: JSON of an object"""
    found, place = {}, _skipped(text, text.index("{") + 1)
    while text[place] != "}":
        name, place = _members.raw_decode(text, place)
        start = _skipped(text, place)
        _, place = _members.raw_decode(text, start)
        found[name] = text[start:place]
        place = _skipped(text, place)
    return found


def _skipped(text: str, place: int) -> int:
    """Skip white space and signs between names and values."""
    while text[place] in " \t\r\n:,":
        place += 1
    return place


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= LONG else _float(digits)


def _float(text: str) -> float:
    most = sys.float_info.max
    return max(-most, min(most, float(text)))
