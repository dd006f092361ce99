"""Request ids: made here, sent back in a header, and found in every log line about the request."""

from __future__ import annotations

import uuid

from starlette.types import Scope

ANSWER_PREFIXES = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/responses": "resp_",
    "/v1/messages": "msg_",
}


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def request_id_of(scope: Scope) -> str:
    """The id that the gate gave to this HTTP request."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def answer_id(request_id: str, route: str) -> str:
    """The `id` that the body of an answer has: the request's, with the prefix that clients know."""
    return request_id.replace("req-", ANSWER_PREFIXES.get(route, "req-"), 1)
