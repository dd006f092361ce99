"""Keys, limits and requests that no route understands: each is one clear error in the dialect of its path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx2
import openai
import pytest
import web
from running import MODEL, Running, running_server
from starlette.routing import Match
from steering import PendingRequest, paused, until

from kvreclaim import LLM, demo_model

TENANT, OTHER, OPERATOR = "key-of-a-tenant", "key-of-another", "key-of-the-operator"
BODY_LIMIT = 4096
PATHS = ("/v1/completions", "/v1/messages")
COMPLETION = {"model": MODEL, "prompt": "GO wind", "max_tokens": 4}
MESSAGE = {"model": MODEL, "messages": [{"role": "user", "content": "GO wind"}], "max_tokens": 4}
BODIES = dict(zip(PATHS, (COMPLETION, MESSAGE), strict=True))


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    llm = LLM(demo_model(), num_blocks=256, max_num_seqs=8, max_model_len=512)
    with running_server(
        llm,
        api_keys=(TENANT, OTHER),
        operator_key=OPERATOR,
        max_body_bytes=BODY_LIMIT,
        max_n=4,
        max_queue_len=3,
        max_concurrent_requests_per_key=2,
        max_concurrent_outputs_per_key=9,
        max_outputs_per_request=7,
    ) as running:
        yield running


def http(server: Running, key: str | None = TENANT, **options) -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return web.Client(base_url=server.base_url, headers=headers, **options)


def openai_client(server: Running, key: str = TENANT) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0)


def anthropic_client(server: Running, key: str = TENANT) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base_url, api_key=key, max_retries=0)


def fails(answer: httpx2.Response, status: int, *words: str) -> dict:
    """Check that the answer is an error of its path's dialect and has the words; return the error."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    error = body["error"]
    if answer.request.url.path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert body["request_id"] == answer.headers["request-id"]
        assert set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    for word in words:
        assert word in error["message"]
    return error


def declared(server: Running) -> list[tuple[str, str]]:
    """(method, path) of everything that the app answers: of its description, and of what it leaves out."""
    app = server.app
    described = [(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item]
    for path in ("/openapi.json", "/metrics", "/", "/page/feed", "/page/app.js"):
        scope = {"type": "http", "path": path, "method": "GET", "headers": []}
        if any(route.matches(scope)[0] is not Match.NONE for route in app.routes):
            described.append(("GET", path))
    return sorted(set(described))


def test_every_route_but_health_wants_a_key(guarded: Running) -> None:
    routes = declared(guarded)
    assert {path for _, path in routes} >= {"/v1/completions", "/health", "/version", "/load"}
    for key in (None, "wrong"):
        with http(guarded, key) as client:
            for method, path in routes:
                answer = client.request(method, path.replace("{", "").replace("}", ""))
                if path == "/health":
                    assert answer.status_code == 200
                else:
                    fails(answer, 401, "API key")
                    assert "Bearer" in answer.headers["www-authenticate"]
            assert client.get("/health/").status_code == 401


@pytest.mark.parametrize(
    "path", ["/load", "/metrics", "/openapi.json", "/", "/page/feed", "/kv_offload/status"]
)
def test_what_tells_about_all_is_the_operators(guarded: Running, path: str) -> None:
    with http(guarded, follow_redirects=True) as client:
        fails(client.get(path), 401, "operator")
    for key in (OPERATOR, OTHER):
        with http(guarded, key) as client:
            assert (client.get("/load").status_code == 200) == (key == OPERATOR)


def test_a_key_comes_in_three_ways(guarded: Running) -> None:
    for headers, auth in (
        ({"authorization": f"Bearer {TENANT}"}, None),
        ({"x-api-key": TENANT}, None),
        ({}, httpx2.BasicAuth("anybody", TENANT)),
    ):
        answer = web.get(f"{guarded.base_url}/version", headers=headers, auth=auth)
        assert answer.status_code == 200
    for value in ("Basic !", f"Basic {TENANT}", "Bearer", TENANT, "Bearer \xff"):
        answer = web.get(f"{guarded.base_url}/version", headers={"authorization": value.encode("latin-1")})
        assert answer.status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_a_body_over_the_limit_is_refused_however_it_comes(guarded: Running, path: str) -> None:
    body = json.dumps({**BODIES[path], "padding": "x" * BODY_LIMIT}).encode()
    json_type = {"content-type": "application/json"}

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    with http(guarded) as client:
        fails(client.post(path, content=body, headers=json_type), 413, f"{BODY_LIMIT} bytes")
        fails(client.post(path, content=pieces(), headers=json_type), 413, f"{BODY_LIMIT} bytes")
        fits = json.dumps(BODIES[path]).encode().ljust(BODY_LIMIT)
        assert client.post(path, content=fits, headers=json_type).status_code == 200
        fails(client.post(path, content=fits + b" ", headers=json_type), 413)


def test_half_a_surrogate_pair_is_a_400_wherever_it_stands(guarded: Running) -> None:
    half = "\ud800"
    tool = {"name": "f", "description": half, "input_schema": {"type": "object"}}
    changes = [
        *((PATHS[0], {name: half}) for name in ("prompt", "model", "stop", "cache_salt", half)),
        (PATHS[0], {"kv_compression": {"policy": half}}),
        (PATHS[0], {"logit_bias": {half: 1}}),
        (PATHS[1], {"messages": [{"role": "user", "content": half}]}),
        (PATHS[1], {"system": half}),
        (PATHS[1], {"tools": [tool]}),
    ]
    with http(guarded) as client:
        for path, change in changes:
            body = json.dumps(BODIES[path] | change)
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            fails(answer, 400)


@pytest.mark.parametrize("path", ["/nonesuch", "/v1/nonesuch", "/v1/messages/nonesuch"])
def test_an_unknown_route_is_a_404_of_its_dialect(guarded: Running, path: str) -> None:
    with http(guarded) as client:
        fails(client.get(path), 404, "Not Found")
        fails(client.post(path, json={}), 404, "Not Found")


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_method_is_a_405(guarded: Running, path: str) -> None:
    with http(guarded) as client:
        answer = client.get(path)
        fails(answer, 405, "Method Not Allowed")
        assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("path", PATHS)
def test_a_full_queue_is_a_429_that_says_when_to_come_back(guarded: Running, path: str) -> None:
    pending = []
    with paused(guarded), http(guarded) as client:
        prompts = {**COMPLETION, "prompt": ["GO wind", "GO wave", "GO sky"]}
        pending.append(PendingRequest(guarded, PATHS[0], prompts, OTHER))
        until(lambda: guarded.service.engine.num_queued == 3)
        answer = client.post(path, json=BODIES[path])
        fails(answer, 429, "3 requests wait")
        assert int(answer.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            openai_client(guarded).completions.create(**COMPLETION)
        with pytest.raises(anthropic.RateLimitError):
            anthropic_client(guarded).messages.create(**MESSAGE)
    assert pending[0].answer().status_code == 200
    with http(guarded) as client:
        assert client.post(path, json=BODIES[path]).status_code == 200


def test_a_key_has_so_many_requests_at_once(guarded: Running) -> None:
    engine = guarded.service.engine
    with paused(guarded), http(guarded) as client:
        first = [PendingRequest(guarded, path, BODIES[path], TENANT) for path in PATHS]
        until(lambda: engine.num_requests == 2)
        for path in PATHS:
            answer = client.post(path, json=BODIES[path])
            fails(answer, 429, "2 requests of this key", "limit is 2")
            assert int(answer.headers["retry-after"]) >= 1
        other = PendingRequest(guarded, PATHS[0], COMPLETION, OTHER)
        until(lambda: engine.num_requests == 3)
    assert [each.answer().status_code for each in (*first, other)] == [200, 200, 200]
    with http(guarded) as client:
        assert client.post(PATHS[0], json=COMPLETION).status_code == 200


@pytest.fixture(scope="module")
def shared(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    """Two tenants without limits of the operator's own."""
    llm = LLM(tiny_dir("llama"), num_blocks=256, scheduling_policy="priority")
    keys = {"api_keys": (TENANT, OTHER), "operator_key": OPERATOR}
    with running_server(llm, max_queue_len=8, **keys) as running:
        yield running


def test_one_key_cannot_fill_the_queue(shared: Running) -> None:
    """Half of it, as outputs: another key finds room whatever the first one requests."""
    with paused(shared), http(shared) as client:
        body = {**COMPLETION, "prompt": ["a", "b"], "n": 2}
        filling = PendingRequest(shared, PATHS[0], body, TENANT)
        until(lambda: shared.service.engine.num_requests == 2)
        for path in PATHS:
            answer = client.post(path, json=BODIES[path])
            fails(answer, 429, "4 outputs of this key", "limit is 4")
            assert int(answer.headers["retry-after"]) >= 1
        other = PendingRequest(shared, PATHS[1], MESSAGE, OTHER)
        until(lambda: shared.service.engine.num_requests == 3)
    assert (filling.answer().status_code, other.answer().status_code) == (200, 200)
    with http(shared) as client:
        assert client.post(PATHS[0], json=body).status_code == 200
        fails(client.post(PATHS[0], json={**body, "n": 3}), 400, "6 outputs", "split it")
    assert not shared.service.room.taken


def test_outputs_of_a_request_are_prompts_times_n(guarded: Running) -> None:
    with http(guarded) as client:
        answer = client.post(PATHS[0], json={**COMPLETION, "prompt": ["GO", "wind"], "n": 4})
        fails(answer, 400, "8 outputs (2 prompts, n 4)", "at most 7", "split it")


def test_every_post_route_counts_against_a_key(guarded: Running) -> None:
    """While two requests of a key run, nothing else of it is begun, whatever the route."""
    routes = [path for method, path in declared(guarded) if method == "POST"]
    routes.remove("/reset_prefix_cache")  # the operator's
    assert set(routes) >= {*PATHS, "/tokenize", "/detokenize", "/v1/messages/count_tokens"}
    with paused(guarded), http(guarded) as client:
        first = [PendingRequest(guarded, path, BODIES[path], TENANT) for path in PATHS]
        until(lambda: guarded.service.engine.num_requests == 2)
        for path in routes:
            fails(client.post(path, json={}), 429, "2 requests of this key")
        assert client.get("/v1/models").status_code == 200
    assert [each.answer().status_code for each in first] == [200, 200]


def test_a_key_cannot_push_itself_forward(shared: Running) -> None:
    with http(shared) as client:
        for path in PATHS:
            fails(client.post(path, json={**BODIES[path], "priority": -1}), 400, "priority is -1", "raise it")
            assert client.post(path, json={**BODIES[path], "priority": 1}).status_code == 200
    with http(shared, OPERATOR) as client:
        for path in PATHS:
            assert client.post(path, json={**BODIES[path], "priority": -(2**31)}).status_code == 200


LONG_TEXT = "a" * 40_000


def test_text_that_cannot_fit_is_not_encoded(tiny_dir: Callable[[str], Path]) -> None:
    """Nor rendered; neither are conversations of more messages than there is room for tokens."""
    llm = LLM(tiny_dir("llama"), num_blocks=64, max_model_len=512)
    many = [{"role": "user", "content": ""}] * 513
    long = [{"role": "user", "content": LONG_TEXT}]
    requests = [
        ("/v1/completions", {"prompt": LONG_TEXT}),
        ("/v1/completions", {"prompt": ["a", LONG_TEXT]}),
        ("/tokenize", {"prompt": LONG_TEXT}),
        *(("/tokenize", {"messages": messages}) for messages in (many, long)),
        *(("/v1/chat/completions", {"messages": messages}) for messages in (many, long)),
        *(("/v1/messages", {"messages": messages, "max_tokens": 1}) for messages in (many, long)),
        *(("/v1/messages/count_tokens", {"messages": messages}) for messages in (many, long)),
    ]
    with running_server(llm) as running:
        service = running.service
        assert service.max_chars < len(LONG_TEXT)
        service.engine.llm.loaded.tokenizer.encode = None  # any encoding fails
        with web.Client(base_url=running.base_url) as client:
            for path, body in requests:
                fails(client.post(path, json={"model": MODEL, **body}), 400, "max_model_len is 512 tokens")


def test_clients_may_be_kept_from_choosing_compression(tiny_dir: Callable[[str], Path]) -> None:
    llm = LLM(tiny_dir("llama"), num_blocks=64)
    with (
        running_server(llm, client_kv_compression=False) as running,
        web.Client(base_url=running.base_url) as client,
    ):
        for path in PATHS:
            body = {**BODIES[path], "kv_compression": {"policy": "knorm"}}
            fails(client.post(path, json=body), 400, "operator's to choose")
            assert client.post(path, json=BODIES[path]).status_code == 200
