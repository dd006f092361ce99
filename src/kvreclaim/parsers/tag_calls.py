"""Calls with arguments written as one tag each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreclaim.parsers.json_object import JsonObject
from kvreclaim.parsers.json_value import json_value
from kvreclaim.parsers.parser import Parser, Tools
from kvreclaim.parsers.pieces import Arguments, CallBegin
from kvreclaim.parsers.scanner import Reading, overlap
from kvreclaim.parsers.schema_types import ALL, SchemaTypes

LONGEST = 512
"""Most characters of a tag."""
SPELLINGS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class TagFormat:
    """How a call is written: opens, head, parameters, tail.

    opens:     each marker that begins a call, and the pattern that ends such a call
    head:      the rest of the beginning, with the group `name`
    parameter: begins an argument, with the group `key` and perhaps `string`, "true" or "false"
    close:     ends an argument
    bounds:    beginnings of tags that end an argument without its closing tag: next argument's, call's
    names:     names that a function can have
    samples:   the shortest tags of `parameter` and `opens`
    around:    markers around all calls, which belong to nothing
    lines:     an argument is on its own lines
    """

    opens: Mapping[str, re.Pattern[str]]
    head: re.Pattern[str]
    parameter: re.Pattern[str]
    close: str
    bounds: tuple[str, ...]
    names: re.Pattern[str]
    samples: tuple[str, ...]
    around: tuple[str, ...] = ()
    lines: bool = False


_WORD = r"[^<>\s]{1,128}"
_BRACELESS = r"[^<>\s{}]{1,128}"
_QUOTABLE = r'[^"<>]{1,128}'

QWEN3_CODER = TagFormat(
    opens={
        "<tool_call>": re.compile(r"\s*</function>\s*</tool_call>"),
        "<function=": re.compile(r"\s*</function>"),
    },
    head=re.compile(rf"\s*(?:<function=)?(?P<name>{_WORD})>"),
    parameter=re.compile(r"\s*<parameter=(?P<key>[^<>]{1,128})>"),
    close="</parameter>",
    bounds=("<parameter=", "</function>"),
    names=re.compile(_WORD),
    samples=("<parameter=x>", "</function>", "</function></tool_call>"),
    around=("</tool_call>",),
    lines=True,
)
GLM = TagFormat(
    opens={"<tool_call>": re.compile(r"\s*</tool_call>")},
    head=re.compile(rf"\s*(?P<name>{_BRACELESS})\s*(?=<)"),
    parameter=re.compile(r"\s*<arg_key>(?P<key>[^<>]{1,128})</arg_key>\s*<arg_value>"),
    close="</arg_value>",
    bounds=("<arg_key>", "</tool_call>"),
    names=re.compile(_BRACELESS),
    samples=("<arg_key>x</arg_key><arg_value>", "</tool_call>"),
)
MINIMAX = TagFormat(
    opens={"<invoke": re.compile(r"\s*</invoke>")},
    head=re.compile(rf'\s+name="(?P<name>{_QUOTABLE})"\s*>'),
    parameter=re.compile(r'\s*<parameter\s+name="(?P<key>[^"<>]{1,128})"\s*>'),
    close="</parameter>",
    bounds=("<parameter", "</invoke>"),
    names=re.compile(_QUOTABLE),
    samples=('<parameter name="x">', "</invoke>"),
    around=("<minimax:tool_call>", "</minimax:tool_call>"),
)
DSML = TagFormat(
    opens={"<｜DSML｜invoke": re.compile(r"\s*</｜DSML｜invoke>")},
    head=re.compile(rf'\s+name="(?P<name>{_QUOTABLE})"\s*>'),
    parameter=re.compile(
        r'\s*<｜DSML｜parameter\s+name="(?P<key>[^"<>]{1,128})"(?:\s+string="(?P<string>true|false)")?\s*>'
    ),
    close="</｜DSML｜parameter>",
    bounds=("<｜DSML｜parameter", "</｜DSML｜invoke>"),
    names=re.compile(_QUOTABLE),
    samples=(
        '<｜DSML｜parameter name="x">',
        '<｜DSML｜parameter name="x" string="true">',
        "</｜DSML｜invoke>",
    ),
    around=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
)


class TagCalls(Parser):
    """Text, and calls in one format. An argument that may be a string is streamed."""

    def __init__(self, form: TagFormat, tools: Tools | None = None) -> None:
        self.format = form
        super().__init__(tools)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.format.opens, *self.format.around)

    @property
    def names(self) -> re.Pattern[str]:
        return self.format.names

    def read(self) -> Reading[None]:
        form, trim = self.format, False
        while marker := (yield from self.scanner.text_until(*self.markers, trim=trim)):
            trim = marker in form.around or (yield from self._call(form.opens[marker]))

    def _call(self, tail: re.Pattern[str]) -> Reading[bool]:
        """Read a call. Returns: False if what comes now is text."""
        scanner = self.scanner
        head = yield from self._tag(self.format.head)
        if head is None:
            scanner.release()
            return False
        name = head["name"]
        scanner.pieces.append(CallBegin(name))
        schemas = SchemaTypes(self.tools.get(name, {}))
        sign, complete = "{", True
        while complete and (tag := (yield from self._tag(self.format.parameter, tail))) is not None:
            if tag.re is tail:
                scanner.pieces.append(Arguments("{}" if sign == "{" else "}"))
                scanner.end_call(complete=True)
                return True
            key = tag["key"].strip()
            scanner.pieces.append(Arguments(f"{sign}{json.dumps(key, ensure_ascii=False)}: "))
            sign = ", "
            schema = _schema(schemas, key, tag.groupdict().get("string"))
            if schemas.types(schema) == {"string"}:
                complete = yield from self._text(tail)
            else:
                complete = yield from self._value(schemas, schema, tail)
        if scanner.ended and self._may_be_tag(scanner.held, tail):
            scanner.take(len(scanner.held))
        scanner.end_call(complete=False)
        return False

    def _may_be_tag(self, text: str, tail: re.Pattern[str]) -> bool:
        """Whether this text begins the next tag of a call: the rest of a sample completes it."""
        return not text.strip() or any(
            tag.fullmatch(text + sample[place:])
            for tag in (self.format.parameter, tail)
            for sample in self.format.samples
            for place in range(len(sample))
        )

    def _tag(self, *tags: re.Pattern[str]) -> Reading[re.Match[str] | None]:
        """Read one of these tags. Returns: None if there is none."""
        scanner = self.scanner
        while True:
            for tag in tags:
                if found := tag.match(scanner.held, 0, LONGEST):
                    scanner.take(found.end())
                    return found
            if len(scanner.held) > LONGEST or not (yield from scanner.more()):
                return None

    def _bound(self, tail: re.Pattern[str], begin: int = 0) -> tuple[int, int | None]:
        """Find the end of the argument in the held text. begin: characters certain to belong to it

        Returns: characters certain to belong to it, and those of its closing tag; None: it continues, or its
        end is uncertain.
        """
        held, form, ended = self.scanner.held, self.format, self.scanner.ended
        close = held.find(form.close, begin)
        bounds = re.compile("|".join(map(re.escape, form.bounds)))
        for found in bounds.finditer(held, begin):
            place = found.start()
            if 0 <= close < place:
                break
            limit = place + LONGEST if close < 0 else min(close, place + LONGEST)
            if form.parameter.match(held, place, limit) or tail.match(held, place, limit):
                return place, 0
            if close < 0 and not ended and len(held) < limit:
                return place, None
        if close >= 0:
            return close, len(form.close)
        return len(held) - max(overlap(held, sign) for sign in (form.close, *form.bounds)), None

    def _text(self, tail: re.Pattern[str]) -> Reading[bool]:
        """Stream a string argument. Returns: False if it does not end."""
        scanner, lines = self.scanner, self.format.lines
        scanner.pieces.append(Arguments('"'))
        begun = not lines
        while True:
            size, closing = self._bound(tail)
            if not begun and size:
                begun = True
                if scanner.held.startswith("\n"):
                    scanner.take(1)
                    size -= 1
            text = scanner.held[:size]
            if lines or not closing:  # the last line break belongs to the next tag
                text = text.removesuffix("\n")
            if text:
                scanner.pieces.append(Arguments(json.dumps(text, ensure_ascii=False)[1:-1]))
            scanner.take(len(text) if closing is None else size + closing)
            if closing is not None:
                scanner.pieces.append(Arguments('"'))
                return True
            if not (yield from scanner.more()):
                scanner.take(len(scanner.held))  # the beginning of a tag
                return False

    def _value(self, schemas: SchemaTypes, schema: Mapping[str, Any], tail: re.Pattern[str]) -> Reading[bool]:
        """Read an argument that may not be a string. Returns: False if it does not end."""
        scanner, size = self.scanner, 0
        while True:
            size, closing = self._bound(tail, size)
            if closing is not None:
                break
            if not (yield from scanner.more()):
                return self._cut_value(schemas, schema, tail)
        text = scanner.take(size).strip()
        scanner.take(closing)
        scanner.pieces.append(Arguments(_json_of(text, schemas, schema)))
        return True

    def _cut_value(self, schemas: SchemaTypes, schema: Mapping[str, Any], tail: re.Pattern[str]) -> bool:
        """Read an argument within which the output ends. Returns: False."""
        scanner, found = self.scanner, JsonObject()
        text = scanner.take(self._bound(tail)[0]).strip()
        scanner.take(len(scanner.held))  # the beginning of a tag
        found.feed('{"":' + text)
        if text:
            scanner.pieces.append(Arguments(_json_of(text, schemas, schema) if found.bad else text))
        return False


def _schema(schemas: SchemaTypes, key: str, string: str | None) -> Mapping[str, Any]:
    """Return the schema of an argument. string: whether the model marks it as one, which decides if the
    function's schema allows both"""
    own = schemas.argument(key)
    if string is None:
        return own
    marked = {"type": "string" if string == "true" else sorted(ALL - {"string"})}
    both = {"allOf": [own, marked]}
    return both if schemas.restricts(both) else own


def _json_of(text: str, schemas: SchemaTypes, schema: Mapping[str, Any]) -> str:
    """Return an argument's JSON: the text itself if it is JSON (or True, False, None), unless the schema
    forbids its value and allows a string; else a string."""
    made = SPELLINGS.get(text, text)
    try:
        value = json_value(made)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    allowed = schemas.fits(value, schema) or "string" not in schemas.types(schema)
    return made if allowed else json.dumps(text, ensure_ascii=False)
