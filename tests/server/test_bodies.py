"""Bodies are parsed once, and a wrong one is refused at the cost of its bytes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import web
from pydantic import BaseModel, ValidationError
from running import MODEL, Running, running_server

from kvreclaim import LLM
from kvreclaim.server.anthropic.fields import ConversationFields, MessageRequest
from kvreclaim.server.base.fields import KVCompression
from kvreclaim.server.http.workers import SMALL
from kvreclaim.server.openai.chat import ChatRequest
from kvreclaim.server.openai.completions import CompletionRequest
from kvreclaim.server.openai.tokenizing import DetokenizeRequest, TokenizeRequest
from kvreclaim.server.responses.fields import ResponsesRequest
from kvreclaim.server.responses.items import CallOutputItem, MessageItem, ReasoningItem
from kvreclaim.server.shared import bodies
from kvreclaim.server.shared.bodies import body_limit

MODELS = (
    CompletionRequest,
    ChatRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessageRequest,
    ConversationFields,
    ResponsesRequest,
)
MANY, FEW = 20_000, 500
PAD = "a" * 5000
USER = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OPTIONS = {"policy": "knorm", "options": {"keep": [[]] * MANY}}
HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("/detokenize", {"tokens": [""] * MANY}, "tokens.0"),
    ("/detokenize", {"tokens": [*range(9), None, *[""] * MANY]}, "tokens.9"),
    ("/v1/completions", {"prompt": [""] * MANY + [1]}, "prompt"),
    ("/v1/completions", {"prompt": "a", "stop": [""] * MANY}, "stop"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [""] * MANY}, "stop_token_ids.0"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): "" for i in range(MANY)}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "kv_compression": OPTIONS}, "kv_compression.options.keep"),
    (
        "/v1/completions",
        {"prompt": "a", "kv_compression": {"options": {str(i): {} for i in range(MANY)}}},
        "kv_compression.options",
    ),
    ("/v1/completions", {"prompt": "a", **{f"x{i}": 1 for i in range(MANY)}}, "x0"),
    ("/v1/chat/completions", {"messages": [{}] * FEW, "cache_salt": PAD}, "messages.0.role"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{}] * FEW}], "cache_salt": PAD},
        "messages.0.content",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]},
        "messages.0.tool_calls.0.id",
    ),
    ("/v1/chat/completions", {"messages": [USER], "tools": [{}] * MANY}, "tools.0.type"),
    (
        "/v1/chat/completions",
        {"messages": [{**USER, **{f"x{i}": 1 for i in range(MANY)}}]},
        "messages.0.x0",
    ),
    ("/v1/responses", {"input": [{}] * FEW, "cache_salt": PAD}, "input.0.role"),
    ("/v1/responses", {"input": "a", "tools": [{}] * MANY}, "tools.0"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{}] * FEW}], "cache_salt": PAD},
        "input.0.content",
    ),
    ("/v1/messages", {"messages": [{}] * FEW, "max_tokens": 1, "cache_salt": PAD}, "messages.0.role"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{}] * FEW}], "max_tokens": 1, "cache_salt": PAD},
        "messages.0.content.0",
    ),
    ("/v1/messages", {"messages": [USER], "system": [{}] * MANY, "max_tokens": 1}, "system.0.type"),
    ("/v1/messages", {"messages": [USER], "tools": [{}] * MANY, "max_tokens": 1}, "tools.0.name"),
    (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 1, "logit_bias": {str(i): "" for i in range(MANY)}},
        "logit_bias",
    ),
]


@pytest.fixture(scope="module")
def server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    with running_server(LLM(tiny_dir("llama"), num_blocks=128), body_timeout_s=0.5) as running:
        yield running


def post(server: Running, path: str, body: bytes, **headers: str) -> httpx2.Response:
    headers = {"content-type": "application/json", **headers}
    return web.post(server.base_url + path, content=body, headers=headers)


@pytest.mark.parametrize(("path", "fields", "named"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_wrong_body_costs_one_error(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], named: str
):
    """However many elements are wrong, and in a thread: the event loop never sees them."""
    counted, threads = [], []

    def parse(model: type[BaseModel], body: bytes, *others: Any) -> BaseModel:
        threads.append(threading.current_thread().name)
        try:
            model.model_validate(json.loads(body))
        except ValidationError as error:
            counted.append(error.error_count())
        return real(model, body, *others)

    real = bodies.parse
    monkeypatch.setattr(bodies, "parse", parse)
    body = json.dumps({"model": MODEL, **fields}).encode()
    assert len(body) > SMALL
    answer = post(server, path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(named)
    assert error.get("param", named) == named
    assert counted[0] <= 4, "one wrong element, seen as each kind that it could have been"
    assert threads[0].startswith("kvreclaim-worker")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("blocks", [False, True])
def test_more_messages_than_tokens_are_not_looked_at(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, blocks: bool
):
    """Nor blocks of them: a model is never made of any."""
    many = server.service.max_model_len + 1
    content = [{"type": "text", "text": "a"}] * many if blocks else "a"
    messages = [{"role": "user", "content": content}] * (1 if blocks else many)
    field = "input" if path == "/v1/responses" else "messages"
    for model in MODELS:
        monkeypatch.setattr(model, "model_validate", None)
    answer = post(server, path, json.dumps({"model": MODEL, field: messages}).encode())
    assert answer.status_code == 400
    assert f"{many} messages or blocks" in answer.json()["error"]["message"]


@pytest.mark.parametrize("model", [*MODELS, MessageItem, CallOutputItem, ReasoningItem])
def test_every_list_stops_at_its_first_wrong_element(model: type[BaseModel]):
    """Checks the schemas that pydantic made, so that fields added later are covered."""
    lists = [node for node in nodes(model.__pydantic_core_schema__) if node.get("type") == "list"]
    assert lists
    assert all(node.get("fail_fast") for node in lists)


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name not in ("json_schema_input_schema", "serialization"):  # these check nothing
                yield from nodes(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from nodes(value)


def test_a_body_is_bounded_by_what_fits_the_model(server: Running):
    assert body_limit(None, 512) == (256 << 10) + 32 * 512
    assert body_limit(None, 1 << 20) == 16 << 20
    assert body_limit(5000, 512) == 5000
    most = body_limit(None, server.service.max_model_len)
    answer = post(server, "/detokenize", b" " * (most + 1))
    assert answer.status_code == 413
    assert str(most) in answer.json()["error"]["message"]
    assert post(server, "/detokenize", b'{"tokens": [5]}' + b" " * (most - 15)).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON object"),
        (b"[" * MANY, "not JSON"),
        (b'{"a":' * MANY, "not JSON"),
        (b"x" * MANY, "not JSON"),
        (b"[" + b"{}," * MANY + b"{}]", "no JSON object"),
        (b'{"tokens": NaN}', "not JSON"),
        (b'{"tokens": [' + b"9" * 5000 + b"]}", "not JSON"),
    ],
    ids=range(7),
)
def test_what_is_no_object_is_refused_in_one_sentence(server: Running, body: bytes, words: str):
    answer = post(server, "/detokenize", body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert len(answer.content) < 400


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "json"])
def test_another_content_type_is_refused(server: Running, kind: str):
    answer = post(server, "/detokenize", b'{"tokens": [5]}', **{"content-type": kind})
    assert answer.status_code == 400
    assert "content-type: application/json" in answer.json()["error"]["message"]
    for kind in ("application/json; charset=utf-8", "application/vnd.x+json", "Application/JSON"):
        assert post(server, "/detokenize", b'{"tokens": [5]}', **{"content-type": kind}).status_code == 200


@pytest.mark.parametrize("framing", [b"content-length: 50", b"transfer-encoding: chunked"])
def test_a_body_that_does_not_come_is_a_408(server: Running, framing: bytes):
    with socket.create_connection(server.listener.getsockname()[:2], timeout=web.LIMIT_S) as client:
        client.sendall(
            b"POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            + framing
            + b"\r\n\r\n2\r\n{"
        )
        answer = b"".join(iter(lambda: client.recv(65_536), b""))  # until the server closes
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"has not come within 0.5 s" in answer


def test_a_number_that_no_float_holds_is_refused(server: Running) -> None:
    headers = {"content-type": "application/json"}
    body = f'{{"model": "{MODEL}", "prompt": "a", "temperature": 1e999}}'
    answer = web.post(f"{server.base_url}/v1/completions", content=body.encode(), headers=headers)
    assert answer.status_code == 400
    assert "beyond 1.8e308" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CompletionRequest, {"prompt": "a"}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
        (ResponsesRequest, {"input": "a"}),
        (MessageRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)
def test_a_policys_name_is_a_compression(body: type[BaseModel], fields: dict[str, Any]) -> None:
    for given, policy in (("auto", "auto"), ({"policy": "auto"}, "auto"), ("off", "full")):
        request = body.model_validate({"model": MODEL, **fields, "kv_compression": given})
        assert request.kv_compression == KVCompression(policy=policy)


@pytest.mark.parametrize(
    "text", [r"a\ud800", r"\ud800\u0041", r"\udc00", r"\\\ud9ab b", r"\ud83d\ude00\uDEAD"], ids=str
)
def test_a_lone_surrogate_is_called_so(server: Running, text: str) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "{text}"}}'
    headers = {"content-type": "application/json"}
    answer = web.post(f"{server.base_url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    escape = max((part for part in (r"\ud800", r"\udc00", r"\ud9ab", r"\uDEAD") if part in text), key=len)
    assert f"the lone surrogate {escape} at line 1 column" in answer.json()["error"]["message"]
    whole = body.replace(text, r"\ud83d\ude00 \\ud800")
    assert web.post(f"{server.base_url}/v1/completions", content=whole, headers=headers).status_code == 200
