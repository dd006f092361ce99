"""Schemas and grammars that no finite text follows."""

from __future__ import annotations

from typing import Any

import pytest

from kvreclaim.parsers.endless import has_text, has_value

ITSELF = {"$ref": "#"}
INSIDE = {"properties": {"x": ITSELF}, "required": ["x"]}


@pytest.mark.parametrize(
    "schema",
    [
        ITSELF,
        {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", **INSIDE},
        {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}, "required": ["x"]},
        {"type": "object", "required": ["x"], "additionalProperties": ITSELF},
        {"type": "array", "minItems": 1, "items": ITSELF},
        {"type": "array", "minItems": 2, "prefixItems": [{}], "items": ITSELF},
        {"type": ["object", "array"], "minItems": 1, "items": ITSELF, **INSIDE},
        {"allOf": [ITSELF, {"type": "string"}]},
        {"$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}, "$ref": "#/$defs/a%7E1b"},
    ],
    ids=str,
)
def test_a_schema_whose_values_contain_another_one_has_none(schema: dict[str, Any]) -> None:
    assert not has_value(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"anyOf": [ITSELF, {"type": "null"}]},
        {"type": "object", "properties": {"x": ITSELF}},
        {"type": ["object", "null"], **INSIDE},
        {"type": "array", "items": ITSELF},
        {"type": "array", "minItems": 1, "prefixItems": [{}], "items": ITSELF},
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}},
            "$ref": "#/$defs/a",
        },
        {"type": "object", "properties": {"x": ITSELF}, "required": ["x"], "enum": [{"x": 1}]},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.org/a.json"},
        INSIDE,
    ],
    ids=str,
)
def test_a_schema_that_may_end_has_a_value(schema: dict[str, Any]) -> None:
    assert has_value(schema)


def test_a_chain_of_any_length_is_judged_or_passed() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(100)}
    for last, ends in (({"type": "null"}, True), ({"$ref": "#/$defs/d0"}, False)):
        assert has_value({"$defs": {**chain, "d100": last}, "$ref": "#/$defs/d0"}) is ends


@pytest.mark.parametrize(
    ("grammar", "ends"),
    [
        ("start: start", False),
        ('start: "a" start', False),
        ('start: ("a" start){2}', False),
        ("start: x ~ 2\nx: start | y\ny: x+", False),
        ('start: "a" x | x "b"\nx: "c" x // "d"', False),
        ('start: "(" start ")" | "x"', True),
        ('start: "a" x?\nx: "c" x', True),
        ('start: ("a" start)* "b"', True),
        ('start: ["a" start] "b"', True),
        ('start: ("a" start){0,3}', True),
        ('start: "a: b" | x\nx[capture="c"]: start', True),
        ('%llguidance {}\nstart: sum\n?sum: N | sum "+" N\nN.2: /[0-9|(]+/i\n%ignore / /', True),
        ('start: %json {"type": "object"}', True),
        ("start: (", True),
    ],
)
def test_rules_that_never_end(grammar: str, ends: bool) -> None:
    """What cannot be read here is left to the library."""
    assert has_text(grammar) is ends
