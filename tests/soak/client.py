"""HTTP by hand, for attackers and for the programs that watch them."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

from server import MODEL, OTHER, Target

ATTACKING, WATCHING = "127.0.0.1", "127.0.0.2"
"""Two addresses of one machine, for limits are per address."""
LIMIT_S = 120.0


def connect(port: int, source: str = ATTACKING) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S, source_address=(source, 0))


def head(method: str, path: str, key: str | None, **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {headers.pop('host', 'localhost')}"]
    lines += [f"authorization: Bearer {key}"] if key is not None else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(path: str, key: str | None, body: bytes, **headers: str) -> bytes:
    sizes = {"content_type": "application/json", "content_length": str(len(body))}
    return head("POST", path, key, **sizes, **headers) + body


def request_body(**fields: Any) -> bytes:
    """Return the body of a request to the model."""
    return json.dumps({"model": MODEL, **fields}).encode()


def answer(client: socket.socket, *, whole: bool = False) -> bytes:
    """The first piece or, of a connection that closes, all; nothing where it was closed without an answer."""
    pieces = []
    with suppress(OSError):
        while piece := client.recv(65_536):
            pieces.append(piece)
            if not whole:
                break
    return b"".join(pieces)


def exchange(port: int, sent: bytes, source: str = ATTACKING, *, whole: bool = False) -> bytes:
    with connect(port, source) as client:
        with suppress(OSError):  # refused already; the answer may be there
            client.sendall(sent)
        return answer(client, whole=whole)


def status(response: bytes) -> int | None:
    return int(response.split(None, 2)[1]) if response else None


def health(target: Target) -> None:
    """Raises: ValueError unless it is well."""
    response = exchange(target.port, head("GET", "/health", None), WATCHING)
    if status(response) != 200:
        raise ValueError(f"/health answered {response[:60]!r}")


def first_token(target: Target, prompt: str) -> None:
    """Return once it has come. Raises: ValueError if something else did."""
    body = request_body(prompt=prompt, max_tokens=1, stream=True, ignore_eos=True)
    with connect(target.port, WATCHING) as client:
        client.sendall(post("/v1/completions", target.key(OTHER), body))
        response = b""
        while b"data: " not in response:
            piece = answer(client)
            response += piece
            if not piece or status(response) != 200:
                raise ValueError(f"a completion answered {response[:60]!r}")
