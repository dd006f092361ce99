"""HTTP by hand, for attackers and for those who watch them."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

ATTACKER, OTHERS = "127.0.0.1", "127.0.0.2"
"""Two addresses of one machine, for limits are per address."""
LIMIT_S = 120.0


def connect(port: int, source: str = ATTACKER) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S, source_address=(source, 0))


def head(method: str, path: str, key: str | None, **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    lines += [f"authorization: Bearer {key}"] if key is not None else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(port: int, path: str, body: bytes, key: str | None) -> int | None:
    """The status, None if the connection was closed without one."""
    asked = head("POST", path, key, content_type="application/json", content_length=str(len(body)))
    with connect(port) as client:
        with suppress(OSError):  # refused already; the answer may be there
            client.sendall(asked + body)
        return status_of(client)


def posted(port: int, body: bytes, key: str | None) -> bytes:
    """The whole answer to a completion."""
    options = {"content_type": "application/json", "content_length": str(len(body)), "connection": "close"}
    with connect(port) as client:
        client.sendall(head("POST", "/v1/completions", key, **options) + body)
        return b"".join(iter(lambda: client.recv(65_536), b""))


def get(port: int, path: str, key: str | None, **headers: str) -> tuple[int | None, bytes]:
    """Status and what came first."""
    with connect(port) as client:
        client.sendall(head("GET", path, key, **headers))
        answer = client.recv(65_536)
        return int(answer.split(None, 2)[1]) if answer else None, answer


def whole(port: int, path: str, key: str | None) -> bytes:
    """All of an answer."""
    with connect(port) as client:
        client.sendall(head("GET", path, key, connection="close"))
        return b"".join(iter(lambda: client.recv(65_536), b""))


def status_of(client: socket.socket) -> int | None:
    try:
        answer = client.recv(65_536)
    except OSError:
        return None
    return int(answer.split(None, 2)[1]) if answer else None


def health(port: int) -> None:
    """Raises: ValueError unless it is well."""
    with connect(port, OTHERS) as client:
        client.sendall(head("GET", "/health", None))
        answer = client.recv(65_536)
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise ValueError(f"/health said {answer[:60]!r}")


def first_token(port: int, key: str | None, prompt: str) -> None:
    """Return once it has come. Raises: ValueError if something else did."""
    asked = {"model": "kvreclaim-demo", "prompt": prompt, "max_tokens": 1, "stream": True, "ignore_eos": True}
    body = json.dumps(asked).encode()
    with connect(port, OTHERS) as client:
        client.sendall(
            head(
                "POST",
                "/v1/completions",
                key,
                content_type="application/json",
                content_length=str(len(body)),
            )
            + body
        )
        answer = b""
        while b"data: " not in answer:
            piece = client.recv(65_536)
            answer += piece
            if not piece or not answer.startswith(b"HTTP/1.1 200 "):
                raise ValueError(f"a completion said {answer[:60]!r}")
