"""Errors in the formats of the two dialects."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from kvreclaim.errors import EngineDeadError, InvalidArgumentError, KVReclaimError, RequestTooLongError
from kvreclaim.refusals import Feature, refuse
from kvreclaim.server.base.identity import request_id_of

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1024
"""Most characters of a message, which may quote a client's text."""
TOO_LONG = "context_length_exceeded"

ANTHROPIC_PREFIX = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
PROMPT_FIELDS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}
SAME_NAMES = (
    *("n", "priority", "stop", "max_tokens", "min_tokens", "stop_token_ids", "logit_bias"),
    *("allowed_token_ids", "bad_words", "prompt_logprobs", "cache_salt", "beam_width"),
    "thinking_token_budget",
)


@cache
def engine_fields() -> dict[str, str]:
    """Engine arguments, apart from the prompt, and their names in requests. Imports the engine, which a
    server of several models does without."""
    from kvreclaim.server.base.fields import feature_fields

    named = {"compression": "kv_compression", "drop_spans": "kv_drop"}
    return named | {name: name for name in (*SAME_NAMES, *feature_fields())}


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """A response with an error status.

    param: the invalid field, with which the message may begin; code: OpenAI's machine-readable reason
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.message) > MAX_MESSAGE:
            self.message = f"{self.message[:MAX_MESSAGE]} ..."
        if self.param is not None:
            self.param = self.param[:MAX_MESSAGE]
        Exception.__init__(self, self.message)

    def about(self, field: str) -> ApiError:
        """Return the error about a field with another name."""
        message = self.message
        if self.param is not None:
            message = re.sub(rf"^{re.escape(self.param)}\b", lambda _: field, message)
        return replace(self, message=message, param=field)


class OpenAIErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """The body of every error, except on /v1/messages."""

    error: OpenAIErrorBody


class AnthropicErrorBody(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of every error of /v1/messages."""

    type: str
    error: AnthropicErrorBody
    request_id: str


def error_body(error: ApiError, path: str, request_id: str) -> dict[str, Any]:
    """JSON of an error in the dialect of the path; also sent as a stream's event."""
    if error.code == TOO_LONG:
        error = replace(error, message=f"{_too_long(error, path)}: {error.message}")
    if path.startswith(ANTHROPIC_PREFIX):
        kind = ANTHROPIC_TYPES.get(error.status, "api_error")
        return {
            "type": "error",
            "error": {"type": kind, "message": error.message},
            "request_id": request_id,
        }
    kind = OPENAI_TYPES.get(error.status, "invalid_request_error")
    body = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": body}


def _too_long(error: ApiError, path: str) -> str:
    """Message by which clients of the path's dialect recognise that a conversation must be shortened."""
    if not path.startswith(ANTHROPIC_PREFIX):
        return "the request exceeds the maximum context length"
    if error.param == "max_tokens":
        return "input length and `max_tokens` exceed context limit"
    return "prompt is too long"


def from_engine(error: KVReclaimError, path: str) -> ApiError:
    """Convert an engine error to a response for this path."""
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error))
    code = TOO_LONG if isinstance(error, RequestTooLongError) else None
    named = engine_fields() | ({"prompt": PROMPT_FIELDS[path]} if path in PROMPT_FIELDS else {})
    return ApiError(400, str(error), named.get(error.field or ""), code)


def refuse_fields(features: Mapping[Feature, object], named: str | None = None) -> None:
    """Check features of a body by the table of refusals. named: the body's name of the field. Raises:
    ApiError naming the field."""
    try:
        refuse(features)
    except InvalidArgumentError as error:
        refused = ApiError(400, str(error), error.field)
        raise (refused if named is None else refused.about(named)) from error


def failed(request_id: str) -> ApiError:
    """Error 500 for a request that failed; its cause is logged under the id."""
    return ApiError(500, f"the request failed inside the engine; the log says why under {request_id}.")


TAG = re.compile(r"Input tag (\S+) found using '(\w+)' does not match any of the expected tags:")
LONGEST_TYPO = 64
"""Longer names of unknown fields are compared with none."""
ONE_OF = r"\2 \1 is not supported here; pass one of"


def from_problem(
    kind: str, location: Sequence[str | int], sentence: str, known: Iterable[str] = ()
) -> ApiError:
    """Convert pydantic's error `kind` at a field. sentence: pydantic's, without a full stop. known: names."""
    where = ".".join(map(str, location))
    if kind == "extra_forbidden":
        is_typo = len(location) == 1 and len(where) < LONGEST_TYPO
        near = get_close_matches(where, known, n=1, cutoff=0.8) if is_typo else ()
        message = f"{where} is not supported here; " + (f"did you mean {near[0]}?" if near else "remove it.")
    elif kind == "union_tag_invalid":
        message = f"{where}: {TAG.sub(ONE_OF, sentence)}."
    else:
        message = f"{where or 'the body'}: {sentence}."
    return ApiError(400, message, param=where or None)


def from_validation(error: RequestValidationError) -> ApiError:
    """Convert the first problem of a path or query; bodies are checked in server/shared/bodies.py."""
    first = error.errors()[0]
    return from_problem(first["type"], first["loc"][1:], first["msg"])  # starts with path or query


def install_handlers(app: FastAPI) -> None:
    """Install handlers that answer errors in the dialect of the path; the gate handles all others."""

    async def answer(request: Request, error: Exception) -> Response:
        failure = _as_answer(error, request)
        body = error_body(failure, request.scope["path"], request_id_of(request.scope))
        return JSONResponse(body, failure.status, headers=failure.headers)

    for kind in (ApiError, KVReclaimError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _as_answer(error: Exception, request: Request) -> ApiError:
    path = request.scope["path"]
    if isinstance(error, KVReclaimError):
        return from_engine(error, path)
    if isinstance(error, RequestValidationError):
        return from_validation(error)
    if isinstance(error, HTTPException):
        message = f"{request.method} {path}: {error.detail.rstrip('.')}."
        return ApiError(error.status_code, message, headers=dict(error.headers or {}))
    assert isinstance(error, ApiError), error
    return error
