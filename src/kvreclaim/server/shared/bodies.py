"""Request bodies: read within limits, parsed once, refused at a cost bounded by their size; their settings.

FastAPI would parse and validate a body in the event loop, and make an error for each invalid element.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Coroutine, Mapping
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.json_value import LARGE
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import ApiError, from_problem
from kvreclaim.server.base.fields import SAMPLING
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.http.events import gone
from kvreclaim.server.http.gate import MAX_BODY_BYTES, read_body
from kvreclaim.server.shared.service import Service, service_of, tenant_of

BASE_BODY_BYTES = 256 << 10
BODY_BYTES_PER_TOKEN = 32

NO_OBJECT = "the body is no JSON object; send one, with the header `content-type: application/json`."
LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?P<high>\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?P<low>\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
SHARED = (*SAMPLING, "logit_bias")
"""Fields of SamplingParams with the same name in both dialects."""


def body_limit(limit: int | None, max_model_len: int) -> int:
    """Return the byte limit of a body: the operator's, or the size of a full context as JSON, with room for
    several prompts."""
    if limit is not None:
        return limit
    return min(MAX_BODY_BYTES, BASE_BODY_BYTES + BODY_BYTES_PER_TOKEN * max_model_len)


class BodyRoute(APIRoute):
    """A route with its own body parser; FastAPI finds the result where it looks for JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model = self.body_field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel), f"{self.path} takes a {model}"

        async def handle(request: Request) -> Response:
            service = service_of(request)
            try:
                body = await read_body(request, service.config.body_timeout_s)
            except ClientDisconnect:
                return gone()
            work = partial(parse, model, body, request.headers.get("content-type", ""), service)
            parsed = await service.workers.run(tenant_of(request).name, work, size=len(body))
            return await handler(_Parsed(request, parsed))

        return handle


class _Parsed(Request):
    """A request with a parsed body."""

    def __init__(self, request: Request, parsed: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._parsed = parsed

    async def body(self) -> bytes:
        return b"{}"  # FastAPI only checks that it is not empty

    async def json(self) -> Any:
        return self._parsed


def num_messages(messages: Any) -> int:
    """Count messages of any shape by their blocks."""
    if not isinstance(messages, list):
        return 0
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    return len(messages) + sum(len(content) - 1 for content in contents if isinstance(content, list))


def num_chars(value: Any) -> int:
    """Count the characters of all texts in a value of any shape; any other value counts as one."""
    found, pending = 0, [value]
    while pending:
        match pending.pop():
            case str(text):
                found += len(text)
            case dict(fields):
                pending += [*fields, *fields.values()]
            case list(items):
                pending += items
            case None:
                pass
            case _:
                found += 1
    return found


def _reason_against(body: bytes, error: str) -> str:
    """Why a body is not JSON. error: the parser's message, which names no surrogate before a text's end"""
    lone = LONE_SURROGATE.search(body) if "hex escape" in error else None
    if lone is None:
        return f"the body is not JSON: {error}."
    escape = (lone["high"] or lone["low"]).decode()
    _, _, place = error.rpartition(" at ")
    return (
        f"the body holds the lone surrogate {escape} at {place}, half of a pair that makes a character; send "
        "both halves, or remove it."
    )


def parse(model: type[BaseModel], body: bytes, content_type: str, service: Service) -> BaseModel:
    """Validate the body. Raises: ApiError 400 for the first problem."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    if not body or kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise ApiError(400, NO_OBJECT)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, _reason_against(body, str(error))) from None
    if not isinstance(value, dict):
        raise ApiError(400, NO_OBJECT)
    if not is_finite(body, value):
        raise ApiError(400, "the body has a number beyond 1.8e308, the largest float; pass a smaller one.")
    field = "input" if "input" in model.model_fields else "messages"
    # Checking each would cost more than reading them.
    service.check_messages(num_messages(value.get(field)), 0, field)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise from_problem(first["type"], first["loc"], first["msg"], model.model_fields) from None


def sampling_of(given: Mapping[str, Any], fields: Container[str]) -> SamplingParams:
    """given: SamplingParams' fields by name; None means absent, and without max_tokens the answer may fill
    the context. fields: the request's own names, for errors. Raises: ApiError 400."""
    settings = {name: value for name, value in given.items() if value is not None}
    if isinstance(bias := settings.get("logit_bias"), Mapping):
        settings["logit_bias"] = _logit_bias(bias)
    try:
        return SamplingParams(**{"max_tokens": None, **settings})
    except InvalidArgumentError as error:
        raise ApiError(400, str(error), error.field if error.field in fields else None) from error


def check_priority(priority: int, tenant: Tenant, limits: ServerConfig) -> None:
    """Raises: ApiError 400 for a priority more urgent than allowed."""
    if priority < limits.min_priority and not tenant.operator:
        raise ApiError(
            400,
            f"priority is {priority}, but this key may ask for {limits.min_priority} or more (more is less "
            "urgent); raise it.",
            "priority",
        )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """Convert JSON's keys, which are strings."""
    wrong = [key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        raise ApiError(
            400, f'logit_bias has the key {wrong[0]!r}; keys are token ids, such as "42".', "logit_bias"
        )
    return {int(key): bias for key, bias in given.items()}


def is_finite(body: bytes, value: Any) -> bool:
    """Whether floats can represent all numbers of this JSON."""
    pending = [value] if LARGE.search(body.decode(errors="replace")) else []
    while pending:
        each = pending.pop()
        if isinstance(each, float) and math.isinf(each):
            return False
        pending += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return True
