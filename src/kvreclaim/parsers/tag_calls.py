"""Calls whose arguments the model writes as tags, one for each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreclaim.parsers.json_value import json_value
from kvreclaim.parsers.parser import Parser, Tools
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd
from kvreclaim.parsers.scanner import Reading, overlap

LONGEST = 512
"""Characters of a tag."""
JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}

SPELLINGS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class TagFormat:
    """How a call is written: opens, head, parameters, tail.

    opens:     each marker that begins a call, and the pattern that ends such a call
    head:      the rest of the beginning, with the group `name`
    parameter: begins an argument, with the group `key` and perhaps `string`, "true" or "false"
    close:     ends an argument
    around:    markers around all calls, which belong to nothing
    lines:     an argument stands on lines of its own
    """

    opens: Mapping[str, re.Pattern[str]]
    head: re.Pattern[str]
    parameter: re.Pattern[str]
    close: str
    around: tuple[str, ...] = ()
    lines: bool = False


QWEN3_CODER = TagFormat(
    opens={
        "<tool_call>": re.compile(r"\s*</function>\s*</tool_call>"),
        "<function=": re.compile(r"\s*</function>"),
    },
    head=re.compile(r"\s*(?:<function=)?(?P<name>[^<>\s]{1,128})>"),
    parameter=re.compile(r"\s*<parameter=(?P<key>[^<>]{1,128})>"),
    close="</parameter>",
    around=("</tool_call>",),
    lines=True,
)
GLM = TagFormat(
    opens={"<tool_call>": re.compile(r"\s*</tool_call>")},
    head=re.compile(r"\s*(?P<name>[^<>\s{}]{1,128})\s*(?=<)"),
    parameter=re.compile(r"\s*<arg_key>(?P<key>[^<>]{1,128})</arg_key>\s*<arg_value>"),
    close="</arg_value>",
)
MINIMAX = TagFormat(
    opens={"<invoke": re.compile(r"\s*</invoke>")},
    head=re.compile(r'\s+name="(?P<name>[^"<>]{1,128})"\s*>'),
    parameter=re.compile(r'\s*<parameter\s+name="(?P<key>[^"<>]{1,128})"\s*>'),
    close="</parameter>",
    around=("<minimax:tool_call>", "</minimax:tool_call>"),
)
DSML = TagFormat(
    opens={"<｜DSML｜invoke": re.compile(r"\s*</｜DSML｜invoke>")},
    head=re.compile(r'\s+name="(?P<name>[^"<>]{1,128})"\s*>'),
    parameter=re.compile(
        r'\s*<｜DSML｜parameter\s+name="(?P<key>[^"<>]{1,128})"(?:\s+string="(?P<string>true|false)")?\s*>'
    ),
    close="</｜DSML｜parameter>",
    around=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
)


class TagCalls(Parser):
    """Text, and calls in one format. An argument that may be a string streams as it comes."""

    def __init__(self, form: TagFormat, tools: Tools | None = None) -> None:
        self.format = form
        super().__init__(tools)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.format.opens, *self.format.around)

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
        schemas = self.tools.get(name, {}).get("properties", {})
        sign, complete = "{", True
        while complete and (tag := (yield from self._tag(self.format.parameter, tail))) is not None:
            if tag.re is tail:
                scanner.pieces += [Arguments("{}" if sign == "{" else "}"), CallEnd()]
                scanner.taken = ""
                return True
            key = tag["key"].strip()
            scanner.pieces.append(Arguments(f"{sign}{json.dumps(key, ensure_ascii=False)}: "))
            sign = ", "
            complete = yield from self._value(_schema(schemas, key, tag.groupdict().get("string")))
        scanner.pieces.append(CallEnd(scanner.taken))
        scanner.taken = ""
        return False

    def _tag(self, *tags: re.Pattern[str]) -> Reading[re.Match[str] | None]:
        """Read one of these tags. Returns: None if none comes."""
        scanner = self.scanner
        while True:
            for tag in tags:
                if found := tag.match(scanner.held, 0, LONGEST):
                    scanner.take(found.end())
                    return found
            if len(scanner.held) > LONGEST or not (yield from scanner.more()):
                return None

    def _value(self, schema: Mapping[str, Any]) -> Reading[bool]:
        """Read an argument. Returns: False if it does not end."""
        scanner, close = self.scanner, self.format.close
        types = types_of(schema)
        if types == {"string"}:
            scanner.pieces.append(Arguments('"'))
            ended = yield from scanner.stream_string(close, lines=self.format.lines)
            scanner.pieces.append(Arguments('"'))
            return ended
        searched = 0
        while (place := scanner.held.find(close, searched)) < 0:
            searched = len(scanner.held) - overlap(scanner.held, close)
            if not (yield from scanner.more()):
                return False
        text = scanner.take(place).strip()
        scanner.take(len(close))
        scanner.pieces.append(Arguments(_json_of(text, types)))
        return True


def _schema(schemas: Any, key: str, string: str | None) -> Mapping[str, Any]:
    """The schema of an argument; string: whether the model says that it is one."""
    if string is not None:
        return {"type": "string" if string == "true" else [each for each in JSON_TYPES if each != "string"]}
    found = schemas.get(key) if isinstance(schemas, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; a string where it says nothing that is understood."""
    given, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    options = schema.get("anyOf", schema.get("oneOf"))
    found: set[str] = set()
    if isinstance(options, list):
        found = {each for one in options if isinstance(one, Mapping) for each in types_of(one)}
    elif given is not None:
        named = given if isinstance(given, list) else [given]
        found = {name for name in named if isinstance(name, str)}
    elif isinstance(values, list):
        found = {name for name, kinds in JSON_TYPES.items() if any(isinstance(v, kinds) for v in values)}
    elif any(name in schema for name in ("$ref", "allOf", "properties", "items")):
        found = set(JSON_TYPES)
    return found or {"string"}


def _json_of(text: str, types: set[str]) -> str:
    """An argument's JSON: the text itself where that is JSON (or True, False, None), unless its type is not
    allowed and a string is; else a string."""
    made = SPELLINGS.get(text, text)
    try:
        value = json_value(made)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    fits = any(isinstance(value, kind) for name in types for kind in JSON_TYPES.get(name, ()))
    return made if fits or "string" not in types else json.dumps(text, ensure_ascii=False)
