"""What clients without a key can do to a connection: heads without end, silence, and many of them."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import web
from running import MODEL, Running, running_server
from steering import paused, until

from kvreclaim import LLM
from kvreclaim.server.http.connections import MAX_HEAD_BYTES, MAX_HEADERS, network_of

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ASK = b'{"model": "%s", "prompt": "GO", "max_tokens": 1}' % MODEL.encode()
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
PIECE = b"a" * 8192


@pytest.fixture(scope="module")
def server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    with running_server(LLM(tiny_dir("llama"), num_blocks=128), headers_timeout_s=30.0) as running:
        yield running


@pytest.fixture
def narrow(tiny_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Room for four connections, two of each client, without PATIENCE_S for either."""
    monkeypatch.setattr("kvreclaim.server.http.connections.PATIENCE_S", 0.0)
    limits = {"max_connections": 4, "max_connections_per_address": 2}
    with running_server(LLM(tiny_dir("llama"), num_blocks=128), **limits) as running:
        yield running


def connect(server: Running, source: str = "127.0.0.1") -> socket.socket:
    address = server.listener.getsockname()[:2]
    return socket.create_connection(address, timeout=web.LIMIT_S, source_address=(source, 0))


def rest(client: socket.socket) -> bytes:
    """Return the bytes that come until the server closes."""
    received = b""
    try:
        while piece := client.recv(65_536):
            received += piece
    except ConnectionError:  # it closed while bytes of ours were on their way
        pass
    return received


def send_for_ever(client: socket.socket, begin: bytes, piece: bytes) -> int:
    """Bytes of pieces sent until the server closes."""
    client.sendall(begin)
    sent = 0
    try:
        while sent < 100 * MAX_HEAD_BYTES:
            client.sendall(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


ENDLESS = {
    "a header": (GET + b"a: ", PIECE),
    "a header's name": (GET, PIECE),
    "a URL": (b"GET /", PIECE),
    "headers": (GET, b"a: b\r\n" * 1000),
    "blank lines": (b"", b"\r\n" * 4096),
    "a trailer": (POST + CHUNKED + b"0\r\na: ", PIECE),
    "trailers": (POST + CHUNKED + b"0\r\n", b"a: b\r\n" * 1000),
    "an extension of a chunk": (POST + CHUNKED + b"5;a=", PIECE),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_head_without_end_is_refused(server: Running, kind: str):
    """Without a key, before there is a request; the bytes that were taken are bounded."""
    begin, piece = ENDLESS[kind]
    with connect(server) as client:
        send_for_ever(client, begin, piece)
        answer = rest(client)
    if answer:  # it may be lost where bytes of ours were on their way when the server closed
        assert answer.split()[1] in (b"431", b"400")
    until(lambda: server.connections.num_open == 0)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (GET + b"a: " + b"x" * (MAX_HEAD_BYTES - 200), 200),
        (GET + b"a: " + b"x" * MAX_HEAD_BYTES, 431),
        (GET + b"a: b\r\n" * (MAX_HEADERS - 1) + b"a: b", 431),
        (GET + b"a: b\r\n" * (MAX_HEADERS - 3) + b"a: b", 200),
        (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\na: b", 431),
    ],
    ids=["header", "long header", "many headers", "headers", "URL"],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_head_has_a_size(server: Running, head: bytes, status: int, whole: bool):
    """The same whether it comes in one piece or in several."""
    data = head + b"\r\n\r\n"
    with connect(server) as client:
        for start in range(0, len(data), len(data) if whole else 5000):
            client.sendall(data[start : start + (len(data) if whole else 5000)])
        assert int(client.recv(65_536).split()[1]) == status


def test_bodies_and_small_chunks_do_not_count(server: Running):
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in ASK.ljust(MAX_HEAD_BYTES // 4))
    with connect(server) as client:
        client.sendall(POST + CHUNKED + chunks + b"0\r\nauthorization: Bearer x\r\n\r\n" + GET + b"\r\n")
        received = b""
        while not received.endswith(b'{"status":"ok"}'):
            received += client.recv(65_536)
        assert received.count(b"HTTP/1.1 200 ") == 2
        body = ASK + b" " * (4 * MAX_HEAD_BYTES)
        client.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert client.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [([b""], [])]
    + [([piece], [b"408"]) for piece in (b"\r\n", GET)]
    + [([GET + b"\r\n"], [b"200"])]
    + [([GET + b"\r\n", piece], [b"200", b"408"]) for piece in (b"\r\n", GET)],
    ids=["nothing", "a blank line", "half a head", "no second", "then a blank line", "then half a head"],
)
def test_a_head_that_does_not_come_ends_the_connection(
    tiny_dir: Callable[[str], Path], sent: list[bytes], statuses: list[bytes]
):
    limits = {"headers_timeout_s": 0.2}
    with running_server(LLM(tiny_dir("llama"), num_blocks=128), keep_alive_s=1, **limits) as server:
        with connect(server) as client:
            client.sendall(sent[0])
            answer = b""
            for later in sent[1:]:
                while not answer.endswith(b"}"):
                    answer += client.recv(65_536)
                client.sendall(later)
            answer += rest(client)
        assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == statuses
        if b"408" in statuses:
            assert b"have not come within 0.2 s" in answer


def test_a_client_makes_room_with_its_own_silent_connections(narrow: Running):
    """The oldest is closed; a connection in the middle of an answer stays."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(connect(narrow)) for _ in range(2))
        other = stack.enter_context(connect(narrow, "127.0.0.2"))
        until(lambda: narrow.connections.num_open == 3)
        third = stack.enter_context(connect(narrow))
        assert rest(first) == b""
        for client in (second, third, other):
            client.sendall(GET + b"\r\n")
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_who_comes_all_at_once_is_turned_away(narrow: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvreclaim.server.http.connections.PATIENCE_S", web.LIMIT_S)
    with ExitStack() as stack:
        first, second = (stack.enter_context(connect(narrow)) for _ in range(2))
        until(lambda: narrow.connections.num_open == 2)
        with connect(narrow) as third:
            assert third.recv(65_536).startswith(b"HTTP/1.1 503 ")
        for client in (first, second):
            client.sendall(GET + b"\r\n")
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_the_client_with_most_silent_connections_makes_room_for_others(narrow: Running):
    with ExitStack() as stack:
        held = {}
        for source in ("127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.4"):
            held.setdefault(source, []).append(stack.enter_context(connect(narrow, source)))
            until(lambda: narrow.connections.num_open == sum(map(len, held.values())))
        with connect(narrow, "127.0.0.5") as late:
            assert rest(held["127.0.0.2"][0]) == b""
            late.sendall(GET + b"\r\n")
            assert late.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_who_waits_for_an_answer_is_not_sent_away(narrow: Running):
    with ExitStack() as stack:
        request = POST + b"content-length: %d\r\n\r\n" % len(ASK) + ASK
        with paused(narrow):
            busy = [stack.enter_context(connect(narrow)) for _ in range(2)]
            for client in busy:
                client.sendall(request)
            until(lambda: narrow.service.engine.num_requests == 2)
            with connect(narrow) as late:
                assert late.recv(65_536).startswith(b"HTTP/1.1 503 ")
        for client in busy:
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
    until(lambda: narrow.connections.num_open == 0)


def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvreclaim.server.http.connections.LINGER_S", 0.2)
    with closing(connect(server)) as client:
        client.sendall(POST + b"content-length: 99999999\r\n\r\n")
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 413 ")
    until(lambda: server.connections.num_open == 0)


def test_whose_an_address_is():
    assert network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_of("2001:db8:1:2:3::9") == network_of("2001:db8:1:2::") == "2001:db8:1:2::"
    assert network_of("2001:db8:1:3::") != network_of("2001:db8:1:2::")
    assert network_of("fe80::1%eth0") == "fe80::"
