"""A JSON object that comes in pieces, against Python's and pydantic's readers of whole ones; schemas and
grammars that no finite text follows."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from kvreclaim.parsers.endless import has_text, has_value
from kvreclaim.parsers.json_object import JsonObject
from kvreclaim.parsers.json_value import json_value, members
from kvreclaim.server.shared.bodies import is_finite

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), values, max_size=3), st.booleans(), st.data())
def test_every_object_is_read_to_its_end_whatever_the_cuts(
    value: dict[str, object], ascii_only: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=data.draw(st.sampled_from([None, 1])))
    cut = data.draw(st.integers(0, len(text)))
    found = JsonObject()
    count = found.feed(text[:cut])
    assert count == cut
    if not found.done:
        count += found.feed(text[cut:] + "} and more")
    assert (count, found.done, found.bad) == (len(text), True, False)


def test_changed_objects_are_what_other_readers_take_them_for() -> None:
    rng = random.Random(0)
    whole = '{"a": [1, -2.5e3, "x\\n\\u00e9\\ud83d\\ude00"], "b": {"c": null, "d": true}, "e": ""}'
    right = 0
    for _ in range(3000):
        text = list(whole)
        for _ in range(rng.randint(1, 2)):
            text[rng.randrange(1, len(text))] = rng.choice('{}[]",:\\u0e-+. \tnt1d')
        changed = "".join(text)
        found = JsonObject()
        count = found.feed(changed)
        try:
            from_json(changed)
            valid = True
        except ValueError:
            valid = False
        assert valid == (found.done and not changed[count:].strip()), changed
        right += valid
    assert right > 100


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[1]", 0),
        ("x", 0),
        ('{"a" 1}', 5),
        ('{"a": 1oops}', 7),
        ('{"a": 01}', 8),
        ('{"a": 1e}', 8),
        ('{"a": tru}', 9),
        ('{"a": "\n"}', 7),
        ('{"a": "\\ud800"}', 13),
        ('{"a": "\\x"}', 8),
        ('{"a": 1,}', 8),
        ('{"a": ' + "[" * 300, 205),
    ],
)
def test_what_is_bad_is_bad_at_its_first_wrong_character(text: str, count: int) -> None:
    found = JsonObject()
    assert (found.feed(text), found.bad, found.done) == (count, True, False)


LARGE = ("1e999", "-1E+999", "9" * 400 + ".5", "-" + "9" * 5000)


@pytest.mark.parametrize("number", LARGE)
def test_numbers_that_no_float_holds(number: str) -> None:
    """They are JSON; as values they are the largest float, so that they can be written again."""
    text = f'{{"x": [{number}], "y": "1e999"}}'
    assert JsonObject().feed(text) == len(text)
    (value,) = json_value(text)["x"]
    assert value == (-sys.float_info.max if number.startswith("-") else sys.float_info.max)
    assert json_value(number) == value
    assert members(text) == {"x": f"[{number}]", "y": '"1e999"'}
    for bad in (f"[{number}, NaN]", f"{number},", f'{number}, "a": 1', f"0{number[-3:]}e999", f"{number}}}"):
        with pytest.raises(ValueError, match=r"JSON|Extra"):
            json_value(bad)


@given(st.dictionaries(st.text(max_size=4), values, max_size=3), st.sampled_from([None, 1]))
def test_members_are_the_texts_of_an_objects_values(value: dict[str, object], indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert json_value(text) == value
    assert {name: json.loads(each) for name, each in members(f" {text}").items()} == value


def test_numbers_of_a_body() -> None:
    for text, finite in (('{"a": [1e999]}', False), ('{"a": "1e999", "b": 1e300}', True), ("{}", True)):
        assert is_finite(text.encode(), from_json(text)) is finite


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
