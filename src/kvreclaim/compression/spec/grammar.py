"""Grammar of policy specs: name, name(option=value), wrapper(policy, option=value), nested at will.

spec  := name [ "(" [ arg { "," arg } ] ")" ]
arg   := [ option "=" ] value
value := integer | float | true | false | none | word | 'text' | "(" [ value { "," value } ] ")" | spec
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, Union

from kvreclaim.errors import InvalidArgumentError

Value = Union[int, float, bool, str, None, tuple["Value", ...], "Spec"]
_TOKEN = re.compile(r"\s*(?:([\w.+-]+)|('[^']*'|\"[^\"]*\")|([(),=]))")
_WORD = re.compile(r"[\w.+-]+")
_INTEGER = re.compile(r"[+-]?\d+")
_FLOAT = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf)")
_CONSTANTS: dict[str, Value] = {"true": True, "false": False, "none": None}
_DEPTH = 16
_FORMS = "write name, name(option=value) or wrapper(name, option=value)"


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed policy: its name, and its arguments with their option names, if any."""

    name: str
    args: tuple[tuple[str | None, Value], ...] = ()


def parse_spec(text: object, noun: str = "policy") -> Spec:
    """Raises InvalidArgumentError if text is not of the form above; knows no policy. noun: what it should
    name."""
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{noun} {text!r} is no name: it is no text; {_FORMS}.")
    parser = _Parser(text, noun)
    spec = parser.value(0)
    parser.expect_end()
    if isinstance(spec, Spec):
        return spec
    if not isinstance(spec, str):
        parser.fail("it is a value")
    return Spec(spec)


def write_value(value: object) -> str:
    """A value as parse_spec reads it. Raises InvalidArgumentError for one that cannot be written."""
    if isinstance(value, Enum):
        value = value.value
    for word, constant in _CONSTANTS.items():
        if value is constant:
            return word
    if isinstance(value, int | float) and value == value:
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(write_value, value))})"
    if isinstance(value, str) and _WORD.fullmatch(value) and isinstance(_read_word(value), str):
        return value
    if isinstance(value, str) and "'" not in value:
        return f"'{value}'"
    if isinstance(value, str) and '"' not in value:
        return f'"{value}"'
    raise InvalidArgumentError(
        f"{value!r} cannot be written in a policy's name; it must be a number, true, false, none, a text "
        "with one kind of quotes, or a tuple of these.",
        field="policy",
    )


class _Parser:
    """One reading of one text, left to right."""

    def __init__(self, text: str, noun: str) -> None:
        self.text, self.noun = text, noun
        self.tokens = list(self._scan())
        self.place = 0

    def _scan(self) -> Iterator[str]:
        start = 0
        while self.text[start:].strip():
            match = _TOKEN.match(self.text, start)
            if match is None:
                self.fail(f"{self.text[start:].strip()!r} cannot be read")
            yield match[0].strip()
            start = match.end()

    def fail(self, reason: str) -> NoReturn:
        raise InvalidArgumentError(f"{self.noun} {self.text!r} is no name: {reason}; {_FORMS}.")

    def peek(self, ahead: int = 0) -> str:
        """Return the next token; "" past the end."""
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.place += 1
        return token

    def expect_end(self) -> None:
        if self.peek():
            self.fail(f"{self.peek()!r} follows its end")

    def value(self, depth: int) -> Value:
        if depth > _DEPTH:
            self.fail(f"it is nested more than {_DEPTH} deep")
        token = self.take()
        if token == "(":
            return tuple(item for _, item in self.items(depth, options=False))
        if token[:1] in ("'", '"'):
            return token[1:-1]
        if not _WORD.fullmatch(token):
            self.fail(
                f"a value is missing before {token!r}" if token else "it ends where a value must follow"
            )
        if self.peek() == "(":
            self.take()
            return Spec(token, tuple(self.items(depth, options=True)))
        return _read_word(token)

    def items(self, depth: int, *, options: bool) -> Iterator[tuple[str | None, Value]]:
        """The items between parentheses, up to and with the closing one; a trailing comma is allowed."""
        while self.peek() != ")":
            option = None
            if options and self.peek(1) == "=" and _WORD.fullmatch(self.peek()):
                option = self.take()
                self.take()
            yield option, self.value(depth + 1)
            if self.peek() == ",":
                self.take()
            elif self.peek() != ")":
                self.fail(
                    f"{self.peek()!r} stands where ',' or ')' must" if self.peek() else "')' is missing"
                )
        self.take()


def _read_word(word: str) -> Value:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _INTEGER.fullmatch(word):
        return int(word)
    return float(word) if _FLOAT.fullmatch(word) else word
