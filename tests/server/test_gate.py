"""A request's first line and headers can be refused, and have no other effect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import web
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import Log
from running import MODEL, Running, running_server
from steering import until

from kvreclaim import LLM
from kvreclaim.server.admin.logs import StructuredFormatter
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.http.gate import Gate, Hosts

KEY = "key-of-a-tenant"
NAMES = ("authorization", "x-api-key", "host", "content-length", "content-type", "traceparent", "expect")
ODD = ("Basic \xe9", "Basic 8J+Y", "Basic w6k=", "Bearer \xe9", "Basic \xff\xfe", "[", "[::1", ":", "\xb2")


@pytest.fixture(scope="module")
def guarded(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    with running_server(LLM(tiny_dir("llama"), num_blocks=128), api_keys=(KEY, "b")) as running:
        yield running


@pytest.fixture(scope="module")
def open_to_all(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    with running_server(LLM(tiny_dir("llama"), num_blocks=128)) as running:
        yield running


@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from(ODD)
            | st.text(st.characters(max_codepoint=255), max_size=40)
            | st.text(max_size=20).map(lambda text: f"Basic {text.encode().hex()}")
            | st.integers(min_value=-(10**30), max_value=10**5000).map(lambda n: f"{n % 10**40:d}"),
        ),
        max_size=6,
    ),
    keys=st.sampled_from([(), (KEY,), (KEY, "b")]),
    operator_key=st.sampled_from([None, "operator"]),
)
@settings(deadline=None)
def test_no_header_is_a_failure(headers: list[tuple[str, str]], keys: tuple[str, ...], operator_key: Any):
    """Through the gate, with nothing behind it."""
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.extend([message["status"]] if message["type"] == "http.response.start" else [])

    config = ServerConfig(served_model_name=("m",), api_keys=keys, operator_key=operator_key)
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
    scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": raw, "state": {}}
    asyncio.run(Gate(app, config, 4096)(scope, None, send))  # type: ignore[arg-type]
    assert len(sent) == 1
    assert sent[0] < 500


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("a.localhost", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7", 200),
        ("rebind.evil:80", 403),
        ("localhost.evil", 403),
        ("127.0.0.1.evil", 403),
        ("evil", 403),
        ("", 403),
    ],
)
def test_without_keys_foreign_names_are_refused(
    open_to_all: Running, guarded: Running, host: str, status: int
):
    answer = web.get(f"{open_to_all.base_url}/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    headers = {"host": host, "x-api-key": KEY}
    assert web.get(f"{guarded.base_url}/v1/models", headers=headers).status_code == 200


def test_hosts_that_the_operator_names():
    def hosts(*names: str, **more: Any) -> Hosts:
        return Hosts(ServerConfig(served_model_name=("m",), allowed_hosts=names, **more))

    named = hosts("api.example", api_keys=("a",))
    assert named.allows("API.example:443")
    assert named.allows("api.example.")
    assert named.allows(None)
    assert not named.allows("127.0.0.1")
    assert hosts("*").allows("evil")
    assert hosts(host="box.lan").allows("box.lan:8000")


@pytest.mark.parametrize("path", ["/metrics/", "/v1/models/", "/health/", "/page/"])
def test_nothing_leads_to_the_host_that_a_request_names(guarded: Running, path: str):
    answer = web.get(guarded.base_url + path, headers={"host": "evil.example", "x-api-key": KEY})
    assert answer.status_code in (401, 404)
    assert "location" not in answer.headers


FORGED = "/x%0a2026-11-22T06:00:00.000+00:00%20INFO%20kvreclaim.access:%20FAKE%20LINE%1b[31m%c2%9b%e2%80%a8"


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_path_cannot_write_a_line_of_its_own(guarded: Running, style: str):
    """Neither ends of lines nor control sequences of a terminal come through, in either format."""
    with Log.attached() as log:
        log.handler.setFormatter(StructuredFormatter(style, log_prompts=False))  # type: ignore[arg-type]
        log.handler.addFilter(lambda record: getattr(record, "fields", {}).get("path", "").startswith("/x"))
        web.get(guarded.base_url + FORGED)
        until(lambda: "FAKE" in log.text)
    (line,) = log.text.splitlines()
    assert "401" in line
    assert all(code not in line for code in "\x1b\x9b\u2028")
    assert "\\u001b[31m\\u009b\\u2028" in line


def test_a_traceback_keeps_its_lines_and_nothing_else():
    formatter = StructuredFormatter("text", log_prompts=True)
    try:
        raise ValueError("a\x1b[2Jb")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("kvreclaim", logging.ERROR, __file__, 1, "one\ntwo", (), info)
    text = formatter.format(record)
    assert "one\\u000atwo\nTraceback" in text or "one\\u000atwo\n  File" in text
    assert "\x1b" not in text


def test_a_long_path_is_cut_in_the_log(guarded: Running, log: Log):
    answer = web.get(f"{guarded.base_url}/{'x' * 5000}")
    assert len(log.access(answer.headers["x-request-id"])["path"]) == 256


def test_variables_that_a_template_does_not_read(open_to_all: Running):
    """Their length, and the word in the template's text, make no difference."""
    for name in ("", "for", "in", "loop", "message", "m", "x" * 200_000, "bos_token", "raise_exception"):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
        body["chat_template_kwargs"] = {name: 1}
        answer = web.post(f"{open_to_all.base_url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
        assert len(answer.content) < 600


@pytest.mark.parametrize("depth", [100, 195, 300, 5000])
def test_deep_tools(open_to_all: Running, depth: int):
    deep = '{"a":' * depth + "1" + "}" * depth
    function = '{"name":"f","parameters":' + deep + "}"
    tool = '{"type":"function","function":' + function + "}"
    for path, text in (
        ("/v1/chat/completions", tool),
        ("/v1/messages", function.replace("parameters", "input_schema")),
    ):
        body = '{"model":"kvreclaim-demo","max_tokens":1,"messages":[{"role":"user","content":"a"}],"tools":['
        headers = {"content-type": "application/json"}
        answer = web.post(open_to_all.base_url + path, content=f"{body}{text}]}}", headers=headers)
        assert answer.status_code in (200, 400)
        assert ("not JSON" in answer.text) == (depth > 195)


CROSS = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        (CROSS, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({**CROSS, "content-type": "text/plain"}, 403),
        ({**CROSS, "authorization": "Basic YTpi"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({**CROSS, "content-type": "application/json"}, 200),
        ({**CROSS, "authorization": "Bearer any"}, 200),
    ],
)
def test_a_foreign_page_changes_nothing(open_to_all: Running, headers: dict[str, str], status: int):
    """Browsers let a page of any site send a POST without a JSON body."""
    answer = web.post(f"{open_to_all.base_url}/reset_prefix_cache", headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "cross_site"


def test_a_page_of_the_servers_own_may_change_it(open_to_all: Running):
    headers = {"origin": open_to_all.base_url}
    assert web.post(f"{open_to_all.base_url}/reset_prefix_cache", headers=headers).status_code == 200


def test_no_route_changes_anything_for_a_foreign_page(open_to_all: Running):
    """But those that take JSON, which a browser does not send there."""
    paths = open_to_all.app.openapi()["paths"]
    routes = [(m, path) for path, found in paths.items() for m in found if m not in ("get", "head")]
    assert ("delete", "/v1/responses/{response_id}") in routes
    for method, path in routes:
        address = open_to_all.base_url + path.replace("{", "").replace("}", "")
        assert web.request(method, address, headers=CROSS).status_code == 403
