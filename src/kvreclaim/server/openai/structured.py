"""Constraints on an answer: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from kvreclaim.engine.features.structured_outputs.wire import KINDS, SCHEMA_FIELDS, checked, of_openai
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import Fields, at_most, described
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.shared.calls import check_grammars
from kvreclaim.server.shared.service import Service
from kvreclaim.structured_outputs import StructuredOutputsParams


class ResponseFormat(Fields):
    """json_schema: name, schema, and perhaps description and strict; the schema is always enforced"""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[dict[str, Any], at_most(len(SCHEMA_FIELDS))] | None = None


StructuredField = Annotated[
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
    form = ResponseFormat(type="text") if response_format is None else response_format
    try:
        spelled = of_openai(structured_outputs, form.type, form.json_schema)
        if spelled is None:
            return None
        made = await service.workers.run(tenant.name, partial(checked, spelled))
    except InvalidArgumentError as error:
        raise ApiError(400, str(error), error.field) from error
    check_grammars(service, spelled[1].partition(".")[0])
    return made
