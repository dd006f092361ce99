"""Request ids: sent back in a header, and part of every log line about the request."""

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
    request_id: str = scope["state"]["request_id"]
    return request_id


def answer_id(request_id: str, route: str) -> str:
    """Return the `id` of an answer's body: the request's id with the route's prefix."""
    return request_id.replace("req-", ANSWER_PREFIXES.get(route, "req-"), 1)
