"""Spellings of structured outputs in the HTTP dialects. All functions raise an InvalidArgumentError for the
wrong field of the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.structured_outputs import StructuredOutputsParams

TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "json": ((str, dict), "a JSON schema"),
    "regex": ((str,), "a text"),
    "choice": ((list,), "a list of texts"),
    "grammar": ((str,), "a text"),
    "json_object": ((bool,), "true"),
}
KINDS = tuple(TYPES)
SCHEMA_FIELDS = ("name", "description", "schema", "strict")
Spelled = tuple[dict[str, Any], str]
"""Fields of StructuredOutputsParams, and their place in the body."""


def of_openai(
    structured_outputs: Mapping[str, Any] | None, kind: str, json_schema: Mapping[str, Any] | None
) -> Spelled | None:
    """Read vLLM's structured_outputs, or the type and json_schema of OpenAI's response_format; None: free
    text."""
    if structured_outputs is not None:
        require(
            kind == "text",
            "response_format and structured_outputs are both set; pass one of them.",
            "response_format",
        )
        return _of_fields(structured_outputs)
    if kind == "json_schema":
        return _of_schema(json_schema or {})
    require(
        json_schema is None,
        f"response_format.json_schema is set, but the type is {kind!r}; set it to 'json_schema'.",
        "response_format.json_schema",
    )
    return ({"json_object": True}, "response_format") if kind == "json_object" else None


def of_anthropic(form: Mapping[str, Any], place: str) -> Spelled:
    """Read output_config.format or output_format, which is at this place."""
    _check_known(form, ("type", "schema"), place, "remove it")
    require(
        form.get("type") == "json_schema" and isinstance(form.get("schema"), dict),
        f"{place} has no schema; pass the type json_schema and a `schema`, an object.",
        place,
    )
    return {"json": form["schema"]}, f"{place}.schema"


def checked(spelled: Spelled) -> StructuredOutputsParams:
    """Check the grammar, whatever the model."""
    from kvreclaim.engine.features.structured_outputs.grammar import check

    given, place = spelled
    try:
        params = StructuredOutputsParams(**given)
        check(params)
    except InvalidArgumentError as error:
        named = str(error).startswith(place.partition(".")[0])
        raise InvalidArgumentError(str(error) if named else f"{place}: {error}", field=place) from error
    return params


def _of_fields(structured_outputs: Mapping[str, Any]) -> Spelled:
    given = {name: value for name, value in structured_outputs.items() if value is not None}
    _check_known(given, KINDS, "structured_outputs", f"pass one of {', '.join(KINDS)}")
    for name, value in given.items():
        types, expected = TYPES[name]
        place = f"structured_outputs.{name}"
        require(isinstance(value, types), f"{place} is a {type(value).__name__}; pass {expected}.", place)
    return given, ".".join(["structured_outputs", *(given if len(given) == 1 else ())])


def _of_schema(json_schema: Mapping[str, Any]) -> Spelled:
    """Read the json_schema of a response_format. The schema is enforced, whatever `strict` is."""
    place = "response_format.json_schema"
    given = {name: value for name, value in json_schema.items() if value is not None}
    _check_known(given, SCHEMA_FIELDS, place, "remove it")
    for name, kind, text in (("name", str, "text; pass one"), ("schema", dict, "object; pass a JSON schema")):
        is_given = isinstance(given.get(name), kind)
        require(is_given, f"{place}.{name} is missing or no {text}.", f"{place}.{name}")
    return {"json": given["schema"]}, f"{place}.schema"


def _check_known(given: Mapping[str, Any], known: tuple[str, ...], place: str, remedy: str) -> None:
    if unknown := next((name for name in given if name not in known), None):
        field = f"{place}.{unknown[:80]}"
        raise InvalidArgumentError(f"{field} is not supported here; {remedy}.", field=field)
