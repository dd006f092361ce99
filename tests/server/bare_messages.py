"""Bodies of /v1/messages as they are, without a client that would mend them."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import web
from running import MODEL, Running

from kvreclaim.server.anthropic.routes import AnsweredMessage

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}{{ m.tool_call_id or '' }}: {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
    "{% if style is defined %}<{{ style }}>{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "the end of the story"}]
RENDERED = "user: the end of the story\nassistant: "
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
DEFINITION = (
    '[{"type": "function", "function": {"name": "weather", "description": "of a city", '
    '"parameters": {"type": "object"}}}]\n'
)
USE = {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Bern"}}
CALL = (
    '[{"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}]'
)
MARK = {"type": "ephemeral"}


def post(server: Running, path: str = "", **fields: Any) -> httpx2.Response:
    """Greedy unless the fields differ."""
    body = {"model": MODEL, "messages": HELLO, **fields}
    if not path:
        body = {"max_tokens": 12, "temperature": 0.0, **body}
    content, headers = json.dumps(body), {"content-type": "application/json"}
    return web.post(f"{server.base_url}/v1/messages{path}", content=content, headers=headers)


def answer(server: Running, **fields: Any) -> AnsweredMessage:
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    return AnsweredMessage.model_validate(response.json())


def text(server: Running, **fields: Any) -> str:
    (block,) = answer(server, **fields).content
    return block.text


def refused(server: Running, path: str = "", **fields: Any) -> str:
    """Return the message of a 400."""
    response = post(server, path, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return body["error"]["message"]
