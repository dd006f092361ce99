"""Requests to /v1/responses over HTTP; OpenAI's client types validate the responses and the events."""

from __future__ import annotations

import json
from typing import Any

import web
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from running import MODEL, Running

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def post(server: Running, body: dict[str, Any], key: str = "any") -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return web.post(f"{server.base_url}/v1/responses", json={"model": MODEL, **body}, headers=headers)


def ask(server: Running, key: str = "any", **body: Any) -> dict[str, Any]:
    """Return the response as JSON, validated by the client's type."""
    answer = post(server, body, key)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return answer.json()


def refused(server: Running, status: int = 400, **body: Any) -> tuple[str | None, str]:
    """(param, message)"""
    answer = post(server, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def events(server: Running, **body: Any) -> list[dict[str, Any]]:
    """Return all events of a stream as JSON, each validated by the client's type."""
    received = []
    with web.stream(
        "POST", f"{server.base_url}/v1/responses", json={"model": MODEL, **body, "stream": True}
    ) as answer:
        assert answer.status_code == 200, answer.read()
        name = None
        for line in answer.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                data = json.loads(value)
                assert data["type"] == name
                event = EVENT.validate_python(data)
                assert event.type == name
                received.append(data)
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    return received


def outline(item: dict[str, Any]) -> Any:
    """Return an item without its ids."""
    kept = {name: value for name, value in item.items() if name not in ("id", "call_id")}
    return kept


def outputs(response: dict[str, Any]) -> list[tuple[str, str]]:
    """(type, text or arguments) of each output item."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in response["output"]
    ]
