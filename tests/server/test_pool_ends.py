"""A pool that is smaller than the model's context: the limits that clients see, and how answers end."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
import web
from running import MODEL, running_server

from kvreclaim import LLM, demo_model

HELD = 64
PROMPT = list(range(5, 15))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    llm = LLM(demo_model(), num_blocks=HELD // 16, max_num_batched_tokens=32)
    with running_server(llm) as server, web.Client(base_url=server.base_url) as client:
        yield client


def complete(client: httpx2.Client, prompt: list[int] = PROMPT, **fields) -> httpx2.Response:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body)


def test_models_have_the_length_that_the_pool_holds(client: httpx2.Client) -> None:
    [model] = client.get("/v1/models").json()["data"]
    assert (model["max_model_len"], model["max_input_tokens"]) == (HELD, HELD - 1)
    tokens = client.post("/tokenize", json={"model": MODEL, "prompt": "GO"}).json()
    assert tokens["max_model_len"] == HELD


def test_max_tokens_beyond_the_pool_are_refused(client: httpx2.Client) -> None:
    answer = complete(client, max_tokens=200)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        400,
        "max_tokens",
        "context_length_exceeded",
    )
    assert "the pool holds 64 (4 blocks of 16); lower max_tokens to 54" in error["message"]
    fitting = complete(client, max_tokens=54).json()
    assert (fitting["usage"]["total_tokens"], fitting["choices"][0]["finish_reason"]) == (HELD, "length")


def test_limits_that_the_client_has_not_named_end_with_the_pool(client: httpx2.Client) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "GO"}], "ignore_eos": True}
    for fields in ({}, {"logprobs": True}):
        answer = client.post("/v1/chat/completions", json=chat | fields).json()
        assert answer["usage"]["total_tokens"] == HELD
    assert complete(client, list(range(5, 63))).json()["usage"]["total_tokens"] == HELD


def test_messages_say_that_the_context_ended(client: httpx2.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "GO"}], "max_tokens": 200}
    answer = client.post("/v1/messages", json=body | {"ignore_eos": True}).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert sum(answer["usage"][name] or 0 for name in ("input_tokens", "output_tokens")) <= HELD


def test_a_compression_of_its_own_goes_further(client: httpx2.Client) -> None:
    own = {"policy": "knorm", "budget": 24, "interval": 16, "sinks": 2, "recent": 8}
    answer = complete(client, max_tokens=200, kv_compression=own)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 200
