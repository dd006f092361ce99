"""Constraints on an answer: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Literal

from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import Fields, at_most, described
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.shared.calls import check_grammars, checked_structured
from kvreclaim.server.shared.service import Service
from kvreclaim.structured_outputs import StructuredOutputsParams

KINDS = tuple(field.name for field in fields(StructuredOutputsParams))
OF_SCHEMA = ("name", "description", "schema", "strict")


class ResponseFormat(Fields):
    """json_schema: name, schema, and perhaps description and strict; the schema is always enforced"""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[dict[str, Any], at_most(len(OF_SCHEMA))] | None = None


StructuredOutputs = Annotated[
    Annotated[dict[str, Any], at_most(len(KINDS))],
    described(f"an object with one of {', '.join(KINDS)}"),
]


async def structured_of(
    structured_outputs: dict[str, Any] | None,
    service: Service,
    tenant: Tenant,
    response_format: ResponseFormat | None = None,
) -> StructuredOutputsParams | None:
    """Return the constraint; None: none. Raises: ApiError naming the field, also for an invalid schema."""
    form = None if response_format is None or response_format.type == "text" else response_format
    if form is not None and structured_outputs is not None:
        raise ApiError(
            400, "response_format and structured_outputs are both set; pass one of them.", "response_format"
        )
    if form is not None:
        given, place = _of_format(form)
    elif structured_outputs is not None:
        given, place = _of_kinds(structured_outputs)
    else:
        _check_without_schema(response_format)
        return None
    made = await service.workers.run(tenant.name, partial(checked_structured, given, place))
    check_grammars(service, place.partition(".")[0])
    return made


def _of_kinds(structured_outputs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Fields of StructuredOutputsParams, and their location. Raises: ApiError naming the field."""
    given = {name: value for name, value in structured_outputs.items() if value is not None}
    if unknown := next((name for name in given if name not in KINDS), None):
        field = f"structured_outputs.{unknown}"
        raise ApiError(400, f"{field} is not supported here; pass one of {', '.join(KINDS)}.", field)
    wrong = next((name for name, value in given.items() if not isinstance(value, _TYPES[name])), None)
    if wrong is not None:
        field = f"structured_outputs.{wrong}"
        raise ApiError(400, f"{field} is a {type(given[wrong]).__name__}; {_WANTED[wrong]}.", field)
    return given, ".".join(["structured_outputs", *(given if len(given) == 1 else ())])


_TYPES: dict[str, tuple[type, ...]] = {
    "json": (str, dict),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "json_object": (bool,),
}
_WANTED = {
    "json": "pass a JSON schema",
    "regex": "pass a text",
    "choice": "pass a list of texts",
    "grammar": "pass a text",
    "json_object": "pass true",
}


def _of_format(form: ResponseFormat) -> tuple[dict[str, Any], str]:
    """Fields of StructuredOutputsParams for a response format, and their location."""
    if form.type == "json_object":
        _check_without_schema(form)
        return {"json_object": True}, "response_format"
    given = {name: value for name, value in (form.json_schema or {}).items() if value is not None}
    if unknown := next((name for name in given if name not in OF_SCHEMA), None):
        field = f"response_format.json_schema.{unknown}"
        raise ApiError(400, f"{field} is not supported here; remove it.", field)
    if not isinstance(given.get("name"), str):
        field = "response_format.json_schema.name"
        raise ApiError(400, f"{field} is missing or no text; pass one.", field)
    if not isinstance(given.get("schema"), dict):
        field = "response_format.json_schema.schema"
        raise ApiError(400, f"{field} is missing or no object; pass a JSON schema.", field)
    return {"json": given["schema"]}, "response_format.json_schema.schema"


def _check_without_schema(form: ResponseFormat | None) -> None:
    if form is not None and form.json_schema is not None:
        field = "response_format.json_schema"
        raise ApiError(400, f"{field} is set, but the type is {form.type!r}; set it to 'json_schema'.", field)
