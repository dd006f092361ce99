"""An incremental JSON object validator.

pydantic's reader of incomplete JSON is no check: it accepts {"x": 1oops} as the beginning of an object.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]
"""Yields when it needs the next character, and returns its result."""

DEEPEST = 200
"""Most levels of nesting, as in jiter, pydantic's JSON reader."""
SPACE = " \t\r\n"
LITERALS: Mapping[str, str] = MappingProxyType({"t": "rue", "f": "alse", "n": "ull"})
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


class _NoJsonError(Exception):
    """The last character makes JSON impossible."""


class JsonObject:
    """done: the object is complete; bad: no more text makes an object of it"""

    def __init__(self) -> None:
        self.done = self.bad = False
        self._reading = _whole()
        next(self._reading)

    def feed(self, text: str) -> int:
        """Read on. Returns: how many characters belong to the object, or can."""
        for count, character in enumerate(text):
            try:
                self._reading.send(character)
            except StopIteration:
                self.done = True
                return count + 1
            except _NoJsonError:
                self.bad = True
                return count
        return len(text)


def _whole() -> Reading[None]:
    if (yield from _skip()) != "{":
        raise _NoJsonError
    yield from _object(1)


def _skip(character: str | None = None) -> Reading[str]:
    """Return the next character that is not white space; character: one that was read already."""
    while character is None or character in SPACE:
        character = yield
    return character


def _value(first: str, depth: int) -> Reading[str | None]:
    """Read a value that begins with this character. Returns: the character after a number, which ends it."""
    if depth > DEEPEST:
        raise _NoJsonError
    if first == '"':
        yield from _string()
    elif first == "{":
        yield from _object(depth)
    elif first == "[":
        yield from _array(depth)
    elif first in LITERALS:
        for wanted in LITERALS[first]:
            if (yield) != wanted:
                raise _NoJsonError
    else:
        return (yield from _number(first))
    return None


def _object(depth: int) -> Reading[None]:
    character = yield from _skip()
    if character == "}":
        return
    while True:
        if character != '"':
            raise _NoJsonError
        yield from _string()
        if (yield from _skip()) != ":":
            raise _NoJsonError
        first = yield from _skip()
        character = yield from _skip((yield from _value(first, depth + 1)))
        if character == "}":
            return
        if character != ",":
            raise _NoJsonError
        character = yield from _skip()


def _array(depth: int) -> Reading[None]:
    character = yield from _skip()
    if character == "]":
        return
    while True:
        character = yield from _skip((yield from _value(character, depth + 1)))
        if character == "]":
            return
        if character != ",":
            raise _NoJsonError
        character = yield from _skip()


def _string() -> Reading[None]:
    while (character := (yield)) != '"':
        if character < " ":
            raise _NoJsonError
        if character != "\\":
            continue
        escaped = yield
        if escaped == "u":
            code = yield from _code()
            if 0xDC00 <= code < 0xE000:
                raise _NoJsonError
            if 0xD800 <= code < 0xDC00:
                yield from _second_half()
        elif escaped not in '"\\/bfnrt':
            raise _NoJsonError


def _code() -> Reading[int]:
    digits = ""
    for _ in range(4):
        character = yield
        if character not in "0123456789abcdefABCDEF":
            raise _NoJsonError
        digits += character
    return int(digits, 16)


def _second_half() -> Reading[None]:
    """Read the second of two escapes for one character."""
    for wanted in "\\u":
        if (yield) != wanted:
            raise _NoJsonError
    if not 0xDC00 <= (yield from _code()) < 0xE000:
        raise _NoJsonError


def _number(first: str) -> Reading[str]:
    text, character = "", first
    while character in "+-.eE0123456789":
        text += character
        character = yield
    if not NUMBER.fullmatch(text):
        raise _NoJsonError
    return character
