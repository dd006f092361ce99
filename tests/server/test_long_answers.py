"""Long answers: bounded before anything is computed, written in threads and in short pieces."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import web
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json
from running import MODEL, Running, running_server

from kvreclaim import LLM
from kvreclaim.server.http import events
from kvreclaim.server.http.events import PIECE, json_of
from kvreclaim.server.openai import answer, completions

LIMIT = 9000
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
)


@pytest.fixture(scope="module")
def server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    llm = LLM(tiny_dir("llama"), num_blocks=512)
    with running_server(llm, max_logprobs_per_request=LIMIT) as running:
        yield running


def ask(server: Running, path: str = "/v1/completions", **fields: Any) -> tuple[int, dict[str, Any]]:
    response = web.post(server.base_url + path, json={"model": MODEL, **fields})
    return response.status_code, response.json()


@given(st.dictionaries(st.text(), JSON), st.integers(0, 3 * PIECE))
def test_in_pieces_it_is_the_same_json(value: dict[str, Any], length: int):
    value["long"] = [{"a": [index, None]} for index in range(length)]
    value["in"] = {"more": list(range(length))}
    assert json.loads(json_of(value)) == json.loads(to_json(value))
    assert json_of(value) == to_json(value)


PROMPT = [5 + i % 200 for i in range(400)]
ASKS: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 20},
    "echo": {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 20},
    "echo, streamed": {"prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 20, "stream": True},
}


@pytest.mark.parametrize("name", ASKS)
def test_they_are_written_beside_the_loop(server: Running, monkeypatch: pytest.MonkeyPatch, name: str):
    """No list is written at once of which much could wait."""
    shaped, written = [], []

    def noting(shape: Callable[..., Any]) -> Callable[..., Any]:
        def shape_and_note(*given: Any, **more: Any) -> Any:
            shaped.append(threading.current_thread().name)
            return shape(*given, **more)

        return shape_and_note

    def to_json_and_note(value: Any, **more: Any) -> bytes:
        written.append(len(value) if isinstance(value, list) else 1)
        return to_json(value, **more)

    monkeypatch.setattr(answer, "prompt_logprobs", noting(answer.prompt_logprobs))
    monkeypatch.setattr(completions, "completion_logprobs", noting(completions.completion_logprobs))
    monkeypatch.setattr(events, "to_json", to_json_and_note)
    response = web.post(f"{server.base_url}/v1/completions", json={"model": MODEL, **ASKS[name]})
    assert response.status_code == 200
    assert shaped[0].startswith("kvreclaim-worker")
    assert max(written) == PIECE


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [PROMPT] * 2, "max_tokens": 1, "prompt_logprobs": 20}),
        ("/v1/completions", {"prompt": [PROMPT] * 2, "max_tokens": 1, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": ["a"] * 8, "n": 4, "max_tokens": 100, "logprobs": 2}),
        (
            "/v1/chat/completions",
            {"max_tokens": 450, "logprobs": True, "top_logprobs": 20},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 440}], "prompt_logprobs": 20},
        ),
    ],
    ids=["prompts", "echo", "outputs", "chat", "chat's prompt"],
)
def test_log_probabilities_of_a_request_are_bounded(server: Running, path: str, fields: dict[str, Any]):
    messages = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
    status, body = ask(server, path, **{**messages, **fields})
    assert status == 400
    error = body["error"]
    assert error["param"] in ("logprobs", "prompt_logprobs")
    assert f"at most {LIMIT}" in error["message"]
    assert "ask for fewer" in error["message"]


def test_an_output_without_a_limit_gets_what_is_left(server: Running):
    messages = [{"role": "user", "content": "a"}]
    options = {"messages": messages, "logprobs": True, "top_logprobs": 20, "ignore_eos": True, "n": 2}
    status, body = ask(server, "/v1/chat/completions", **options, temperature=1.0)
    assert status == 200
    assert body["usage"]["completion_tokens"] == 2 * (LIMIT // 42)
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}


def test_what_is_within_the_bound_is_answered(server: Running):
    status, body = ask(server, prompt=[PROMPT], max_tokens=1, prompt_logprobs=20)
    assert status == 200
    assert len(body["choices"][0]["prompt_logprobs"]) == len(PROMPT)
