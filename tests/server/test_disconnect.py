"""A client that goes away takes its request with it; one that does not read holds up no other."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import web
from running import MODEL, Running, running_server
from steering import LIMIT_S, assert_empty, blocks_in_use, halted, paused, stepping, until

from kvreclaim import LLM, demo_model

PROMPT = "GO wind wave sky " * 20
LONG = {"temperature": 0.0, "ignore_eos": True, "min_tokens": 3500}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": PROMPT, "max_tokens": 3500, **LONG},
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_completion_tokens": 3500,
        **LONG,
    },
    "/v1/responses": {"model": MODEL, "input": PROMPT, "max_output_tokens": 3500, **LONG},
    "/v1/messages": {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 3500,
        "temperature": 0.0,
        "ignore_eos": True,
    },
}


@pytest.fixture(scope="module")
def busy() -> Iterator[Running]:
    llm = LLM(demo_model(), num_blocks=1024, max_num_seqs=4, max_model_len=4096)
    with running_server(llm) as running:
        yield running


class Client:
    """A socket that has sent a request."""

    def __init__(self, server: Running, path: str, body: dict[str, Any], buffer: int | None = None) -> None:
        host, port = server.base_url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect((host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        self.socket.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    def read_until(self, what: bytes) -> bytes:
        seen = bytearray()
        while what not in seen[-65536 - len(what) :]:
            more = self.socket.recv(65536)
            assert more, bytes(seen)
            seen += more
        return bytes(seen)

    def leave(self) -> None:
        self.socket.close()


@pytest.mark.parametrize("path", BODIES)
def test_leaving_a_stream_gives_its_blocks_back(busy: Running, path: str) -> None:
    with halted(busy):
        client = Client(busy, path, {**BODIES[path], "stream": True})
        client.read_until(b"data: ")
        assert blocks_in_use(busy) > 0
        client.leave()
        assert_empty(busy)


@pytest.mark.parametrize("path", BODIES)
def test_leaving_while_waiting_for_the_whole_answer_gives_its_blocks_back(busy: Running, path: str) -> None:
    with halted(busy) as wait:
        client = Client(busy, path, BODIES[path])
        wait()
        assert blocks_in_use(busy) > 0
        client.leave()
        assert_empty(busy)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue_leaves_nothing_in_it(busy: Running, path: str, stream: bool) -> None:
    engine = busy.service.engine
    with paused(busy):
        client = Client(busy, path, {**BODIES[path], "stream": stream})
        until(lambda: engine.num_queued == 1)
        client.leave()
        until(lambda: engine.num_queued == 0)
    assert_empty(busy)


def test_leaving_the_waiting_line_behind_others_leaves_the_others(busy: Running) -> None:
    path = "/v1/completions"
    scheduler = busy.llm.engine.scheduler
    with stepping(busy, lambda: scheduler.waiting and len(scheduler.running) < 4):
        first = [Client(busy, path, {**BODIES[path], "stream": True}) for _ in range(4)]
        until(lambda: len(scheduler.running) == 4)
        last = Client(busy, path, {**BODIES[path], "stream": True})
        until(lambda: len(scheduler.waiting) == 1)
        last.leave()
        until(lambda: not scheduler.waiting)
        assert len(scheduler.running) == 4
        for client in first:
            client.leave()
        assert_empty(busy)


def test_leaving_takes_every_prompt_and_every_output_along(busy: Running) -> None:
    path = "/v1/completions"
    body = {**BODIES[path], "prompt": ["GO wind", "GO wave"], "n": 2, "temperature": 1.0, "stream": True}
    client = Client(busy, path, body)
    client.read_until(b'"index":3')
    client.leave()
    assert_empty(busy)


def test_a_client_that_does_not_read_holds_up_no_other(busy: Running) -> None:
    """Between server and client there is room for a fraction of the answer: the server has to wait."""
    path, num_tokens, room = "/v1/completions", 600, 8192
    busy.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    long = {"max_tokens": num_tokens, "min_tokens": num_tokens, "logprobs": 5, "stream": True}
    with halted(busy) as wait:
        stuck = Client(busy, path, BODIES[path] | long, buffer=room)
        wait()
    short = {"model": MODEL, "prompt": "GO wind", "max_tokens": 8, "temperature": 0.0}
    for _ in range(5):
        assert web.post(busy.base_url + path, json=short).status_code == 200
    assert_empty(busy)  # its own request has come to its end without a reader
    chunks = [
        json.loads(line[6:])["choices"]
        for line in _unchunked(stuck.read_until(b"data: [DONE]")).split(b"\n")
        if line.startswith(b"data: {")
    ]
    stuck.leave()
    tokens = [token for choices in chunks for choice in choices for token in choice["logprobs"]["tokens"]]
    assert len(tokens) == num_tokens
    assert len(chunks) < num_tokens / 2, "the server never had to wait, so nothing was shown"


def _unchunked(answer: bytes) -> bytes:
    """The body of a chunked answer."""
    body, rest = b"", answer.split(b"\r\n\r\n", 1)[1]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not (length := int(size, 16)):
            break
        body, rest = body + rest[:length], rest[length + 2 :]
    return body
