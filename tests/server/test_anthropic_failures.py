"""/v1/messages when something goes wrong, or slowly, as Anthropic's own client sees it."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import count
from typing import Any

import anthropic
import pytest
import web
from bare_messages import HELLO
from messaging import GREEDY, Connect, ask, expected
from running import MODEL, Running, running_server
from steering import LIMIT_S, paused, read_at_once, until

from kvreclaim import LLM
from kvreclaim.server.anthropic import answer as answers


@pytest.fixture
def client(tiny_server: Running, connect: Connect) -> anthropic.Anthropic:
    return connect(tiny_server)


# Errors


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(tiny_server: Running, client: anthropic.Anthropic, stream: bool):
    given = {"model": MODEL, "max_tokens": 4, "messages": HELLO, "stream": stream}
    with pytest.raises(anthropic.NotFoundError, match="model 'gpt' is not served here"):
        client.messages.create(**{**given, "model": "gpt"})
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*max_model_len") as refused:
        client.messages.create(**{**given, "messages": [{"role": "user", "content": "x" * 2000}]})
    body = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == refused.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="inference_geo is not supported here"):
        client.messages.create(**given, inference_geo="eu")


def test_keys_limits_and_sizes(tiny_oracle: LLM, connect: Connect):
    given = {"model": MODEL, "max_tokens": 4, "messages": HELLO}
    limits = {"api_keys": ("right",), "max_body_bytes": 2048, "max_queue_len": 1}
    with running_server(tiny_oracle, **limits) as server:
        client = connect(server, api_key="right")
        assert client.messages.create(**given).usage.output_tokens == 4
        with pytest.raises(anthropic.AuthenticationError, match="API key is missing or unknown"):
            client.with_options(api_key="wrong").messages.create(**given)
        bearer = connect(server, api_key=None, auth_token="right")
        assert bearer.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 0
        with pytest.raises(anthropic.RequestTooLargeError):
            client.messages.create(**{**given, "system": "x" * 4000})
        with paused(server):
            waiting = asyncio.run_coroutine_threadsafe(_ask_async(server, given), server.loop)
            until(lambda: server.service.engine.num_queued)
            with pytest.raises(anthropic.RateLimitError, match="limit is 1") as refused:
                client.messages.create(**given)
            assert refused.value.response.headers["retry-after"] == "1"
        assert waiting.result(LIMIT_S).usage.output_tokens == 4


async def _ask_async(server: Running, given: dict[str, Any]) -> anthropic.types.Message:
    async with anthropic.AsyncAnthropic(base_url=server.base_url, api_key="right", max_retries=0) as client:
        return await client.messages.create(**given)


class Failing:
    """Stands in for the runner's forward pass: fails from the given call on, or runs it."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward
        self.good_calls = 10**9

    def __call__(self, *args: Any) -> Any:
        self.good_calls -= 1
        if self.good_calls < 0:
            raise RuntimeError("the device is gone")
        return self.forward(*args)


def test_a_failing_request_is_a_500_or_the_last_event_of_its_stream(
    tiny_oracle: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, connect: Connect
):
    failing = Failing(tiny_oracle.engine.runner.forward)
    monkeypatch.setattr(tiny_oracle.engine.runner, "forward", failing)
    given = {"model": MODEL, "max_tokens": 12, "messages": HELLO, "extra_body": GREEDY}
    with running_server(tiny_oracle) as server:
        client = connect(server)
        for stream in (False, True):
            failing.good_calls = 0
            with pytest.raises(anthropic.InternalServerError, match="failed inside the engine") as error:
                client.messages.create(**given, stream=stream)
            assert error.value.body["error"]["type"] == "api_error"
            assert error.value.body["request_id"] in caplog.text
        failing.good_calls = 3
        with read_at_once(server):
            stream = client.messages.create(**given, stream=True)
            assert next(stream).type == "message_start"
            with pytest.raises(anthropic.APIStatusError, match="failed inside the engine") as error:
                list(stream)
        assert error.value.body["error"]["type"] == "api_error"
        failing.good_calls = 10**9
        assert client.messages.create(**given).usage.output_tokens == 12, "the next request is served"
        assert tiny_oracle.engine.memory.stats().in_use == 0


# Silence


def test_pings_fill_the_silence(tiny_oracle: LLM, monkeypatch: pytest.MonkeyPatch):
    """A step that does not end: pings come, before the answer and within it, and it is whole all the same."""
    forward, go, num_calls = tiny_oracle.engine.runner.forward, [threading.Event() for _ in range(2)], count()

    def held(*args: Any) -> Any:
        if (call := next(num_calls)) in (0, 5):
            assert go[call > 0].wait(LIMIT_S)
        return forward(*args)

    monkeypatch.setattr(tiny_oracle.engine.runner, "forward", held)
    monkeypatch.setattr(answers, "PING_S", 0.01)
    body = {"model": MODEL, "max_tokens": 12, "messages": HELLO, "stream": True, **GREEDY}
    with running_server(tiny_oracle) as server, web.Client() as http:
        request = http.build_request("POST", f"{server.base_url}/v1/messages", json=body)
        lines = http.send(request, stream=True).iter_lines()
        assert [next(lines) for _ in range(2)] == ["event: ping", 'data: {"type":"ping"}']
        go[0].set()
        events = []
        for line in lines:
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if events[-1]["type"] == "ping" and "message_start" in [event["type"] for event in events]:
                    go[1].set()
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == expected(tiny_oracle).text


def test_the_client_reads_over_pings(
    tiny_server: Running, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(answers, "PING_S", 0.0)
    given = {"model": MODEL, "max_tokens": 12, "messages": HELLO, "extra_body": GREEDY}
    with client.messages.stream(**given) as stream:
        text = stream.get_final_text()
    assert text == ask(client).content[0].text
