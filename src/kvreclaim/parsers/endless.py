"""Schemas and grammars without any finite text, because each text would contain another one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MAX_ROUNDS = 32
"""Most rounds, each of which uses the previous one; longer chains are not judged."""
CONTAINERS = frozenset({"object", "array"})
"""Types whose values may have to contain others."""

Expression = bool | str | tuple[str, list[Any]]
"""The body of a rule: whether it ends, a rule's name, or "any" or "all" of several expressions."""
_HEAD = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w\-]*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:(?!:)", re.M)
_DIRECTIVE = re.compile(r"^[ \t]*%(?:llguidance|ignore)\b.*$", re.M)
_TOKEN = re.compile(
    r"""\s+|//[^\n]*|(?P<terminal>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\n]*>|\.\.)"""
    r"""|(?P<name>[A-Za-z_][\w\-]*)|(?P<repeat>[?*+]|\{\s*(\d*)\s*(?:,\s*\d*\s*)?\}|~\s*(\d+)(?:\.\.\d+)?)"""
    r"""|(?P<sign>[()|\[\]])"""
)


def has_value(schema: Any) -> bool:
    """Whether a finite JSON value may follow a schema. Only recursive schemas can have none."""
    ends: set[int] = set()
    for _ in range(MAX_ROUNDS):
        before = len(ends)
        if _Round(schema, ends).settle(schema):
            return True
        if len(ends) == before:
            return False
    return True


class _Round:
    """One pass over the parts of a schema. ends: ids of the parts that have a value, which grow."""

    def __init__(self, root: Any, ends: set[int]) -> None:
        self._root = root
        self._ends = ends
        self._seen: set[int] = set()

    def settle(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        if id(schema) in self._seen or id(schema) in self._ends:
            return id(schema) in self._ends
        self._seen.add(id(schema))
        if self._follows(schema):
            self._ends.add(id(schema))
        return id(schema) in self._ends

    def _follows(self, schema: Mapping[str, Any]) -> bool:
        if not self.settle(self._target(schema.get("$ref"))):
            return False
        if not all(map(self.settle, _listed(schema.get("allOf")))):
            return False
        choices = [options for key in ("anyOf", "oneOf") if (options := _listed(schema.get(key)))]
        if not all(any(map(self.settle, options)) for options in choices):
            return False
        return "const" in schema or "enum" in schema or self._has_shape(schema)

    def _has_shape(self, schema: Mapping[str, Any]) -> bool:
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not {*map(str, kinds)} <= CONTAINERS:
            return True
        return ("object" in kinds and self._has_object(schema)) or (
            "array" in kinds and self._has_array(schema)
        )

    def _has_object(self, schema: Mapping[str, Any]) -> bool:
        named, more = schema.get("properties"), schema.get("additionalProperties", True)
        properties = named if isinstance(named, Mapping) else {}
        others = True if "patternProperties" in schema else more
        return all(self.settle(properties.get(name, others)) for name in _listed(schema.get("required")))

    def _has_array(self, schema: Mapping[str, Any]) -> bool:
        least, first = schema.get("minItems", 0), _listed(schema.get("prefixItems"))
        if not isinstance(least, int | float) or least <= 0:
            return True
        needed = first[: int(least)]
        return all(map(self.settle, needed)) and (
            len(needed) >= least or self.settle(schema.get("items", True))
        )

    def _target(self, reference: Any) -> Any:
        """Resolve a reference; True for one that is not judged here."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True
        found = self._root
        for step in filter(None, reference[1:].split("/")):
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                return True
        return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def has_text(lark: str, start: str = "start") -> bool:
    """Whether a finite text may follow a Lark grammar. Unjudged parts, such as JSON schemas or intersections,
    count as possible."""
    pieces = _HEAD.split(_DIRECTIVE.sub("", lark))
    try:
        rules = {name: _expression(body) for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}
    except ValueError:
        return True
    ends: set[str] = set()
    for _ in range(MAX_ROUNDS):
        new = {name for name in rules.keys() - ends if _ends(rules[name], rules.keys() - ends)}
        if not new:
            return start not in rules or start in ends
        ends |= new
    return True


def _ends(expression: Expression, endless: set[str]) -> bool:
    """Whether an expression has a text without these rules."""
    match expression:
        case bool():
            return expression
        case str():
            return expression not in endless
        case ("any", parts):
            return any(_ends(each, endless) for each in parts)
    return all(_ends(each, endless) for each in expression[1])


def _expression(body: str) -> Expression:
    """Read the body of a rule. Raises: ValueError for unjudged parts."""
    open_: list[list[list[Expression]]] = [[[]]]
    place = 0
    while place < len(body):
        found = _TOKEN.match(body, place)
        if found is None:
            raise ValueError(f"no expression: {body[place:][:20]!r}")
        place = found.end()
        last = open_[-1][-1]
        if found["terminal"]:
            last.append(True)
        elif found["name"]:
            last.append(found["name"])
        elif found["repeat"]:
            least = (found[4] or found[5] or "0") if found["repeat"][0] in "{~" else found["repeat"]
            if least in "?*" or int(least.replace("+", "1")) == 0:
                last[-1:] = [True]
        elif found["sign"] == "|":
            open_[-1].append([])
        elif found["sign"] and found["sign"] in "([":
            open_.append([[]])
        elif found["sign"]:
            inner = _any(open_.pop())
            if not open_:
                raise ValueError("a bracket closes nothing")
            open_[-1][-1].append(True if found["sign"] == "]" else inner)
    if len(open_) > 1:
        raise ValueError("a bracket is not closed")
    return _any(open_[0])


def _any(options: list[list[Expression]]) -> Expression:
    return "any", [("all", parts) for parts in options]
