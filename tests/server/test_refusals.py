"""Refusals before there is a request: every one is counted, few are logged."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import web
from exposition import Scrape
from logged import Log
from running import Running, running_server
from steering import until

from kvreclaim import LLM
from kvreclaim.server.http.connections import LINE_S, MAX_HEAD_BYTES, Refusals, logger

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
LONG = GET + b"a: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n"


@pytest.fixture
def server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    limits = {"headers_timeout_s": 0.2, "max_connections_per_address": 2}
    with running_server(LLM(tiny_dir("llama"), num_blocks=128), **limits) as running:
        yield running


def answer(server: Running, sent: bytes) -> bytes:
    """Everything until the server closes."""
    address = server.listener.getsockname()[:2]
    with socket.create_connection(address, timeout=web.LIMIT_S) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65_536), b""))


def counts(server: Running) -> dict[str, float]:
    """Responses without a request of the engine, by status."""
    rows = Scrape.of(web.get(f"{server.base_url}/metrics").text).rows("kvreclaim:http_responses_total")
    return {
        labels["status"]: count
        for labels, count in rows
        if (labels["handler"], labels["method"]) == ("unmatched", "other")
    }


@pytest.mark.parametrize(("sent", "status"), [(GET, 408), (LONG, 431), (b"\x16\x03\x01\x02\r\n\r\n", 400)])
def test_what_never_becomes_a_request_is_counted_and_logged(server: Running, sent: bytes, status: int):
    with Log.attached() as log:
        for _ in range(3):
            assert answer(server, sent).startswith(b"HTTP/1.1 %d " % status)
        assert counts(server) == {str(status): 3}
        [line] = [line for line in log.lines if line["logger"] == logger.name]
        assert (line["level"], line["message"]) == ("warning", f"a connection was refused: {status}")
        assert (line["status"], line["client"], line["unlogged"]) == (status, "127.0.0.1", 0)
        assert not [line for line in log.lines if line["logger"].startswith("uvicorn")]


def test_too_many_connections_are_counted(server: Running):
    address = server.listener.getsockname()[:2]
    with socket.create_connection(address), socket.create_connection(address):
        until(lambda: server.connections.num_open == 2)
        assert answer(server, b"").startswith(b"HTTP/1.1 503 ")
    until(lambda: server.connections.num_open == 0)
    assert counts(server) == {"503": 1}


def test_who_has_an_answer_gets_no_second_one(server: Running):
    """The rest of a refused body is read, but not for ever."""
    post = b"POST /v1/completions HTTP/1.1\r\nhost: evil.example\r\ntransfer-encoding: chunked\r\n\r\n"
    address = server.listener.getsockname()[:2]
    with socket.create_connection(address, timeout=web.LIMIT_S) as client:
        client.sendall(post + b"0\r\na: ")
        assert client.recv(65_536).startswith(b"HTTP/1.1 403 ")
        client.sendall(b"x" * (MAX_HEAD_BYTES + 1))
        with suppress(ConnectionResetError):  # it closed while bytes of ours were on their way
            while piece := client.recv(65_536):
                assert b"HTTP/1.1" not in piece
    until(lambda: server.connections.num_open == 0)
    assert counts(server) == {}


def test_lines_are_rare_and_say_what_had_none():
    now, counted = [100.0], Counter[int]()
    noting = Refusals(lambda status: counted.update([status]), lambda: now[0])
    with Log.attached() as log:
        for _ in range(1000):
            noting.note(431, "192.0.2.1")
        noting.note(503, "192.0.2.2")
        now[0] += LINE_S
        noting.note(431, "192.0.2.3")
        now[0] += LINE_S
        noting.note(431, "192.0.2.4")
        assert [(line["status"], line["client"], line["unlogged"]) for line in log.lines] == [
            (431, "192.0.2.1", 0),
            (503, "192.0.2.2", 0),
            (431, "192.0.2.3", 999),
            (431, "192.0.2.4", 0),
        ]
    assert counted == {431: 1002, 503: 1}
