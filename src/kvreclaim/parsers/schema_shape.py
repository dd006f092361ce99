"""Required types of the JSON schema keywords that are read here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    return _is_text(value) or _are_texts(value)


SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, "a type's name or a list of such names"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    "required": (_are_texts, "a list of names"),
    "additionalProperties": (_is_schema, "true, false or a schema"),
    "pattern": (_is_text, "a regular expression"),
    "$ref": (_is_text, "a text"),
    **dict.fromkeys(("properties", "$defs", "definitions"), (_are_named_schemas, "an object of schemas")),
    **dict.fromkeys(("anyOf", "oneOf"), (_are_schemas, "a list of schemas")),
    **dict.fromkeys(("minLength", "maxLength"), (_is_length, "an integer >= 0")),
}


def misshapen(schema: Mapping[str, Any]) -> str | None:
    """Describe the first of its own keywords that cannot be read; None: all can."""
    for keyword, (fits, wanted) in SHAPES.items():
        if keyword in schema and not fits(schema[keyword]):
            return f"has {keyword} {str(schema[keyword])[:80]!r}; pass {wanted}"
    return None
