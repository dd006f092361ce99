"""What attacks are made of: targets, outcomes, bodies, and streams without end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack_client import connect, post, status_of

MODEL = "kvreclaim-demo"
KEYS = ("key-of-the-attacker", "key-of-another", "key-of-the-operator")
WORDS = ("lark", "shell", "dew", "mole", "nest", "wind", "wave", "sky", "sun", "sand")
MAX_LEN = 4096
CAP = (256 << 10) + 32 * MAX_LEN
"""Of a body, where the server's defaults hold."""
REFUSED = (400, 401, 403, 404, 408, 413, 429, 431)


@dataclass(frozen=True)
class Target:
    """One server. other_key: of the tenant that is not attacking"""

    port: int
    pid: int
    log: Path
    key: str | None
    other_key: str | None
    operator_key: str | None


@dataclass(frozen=True)
class Outcome:
    """One request of an attack. sent: its bytes; together: of all that were sent with it at once"""

    status: int | None
    sent: int
    elapsed_s: float
    together: int


@dataclass(frozen=True)
class Attack:
    """strike: attack once; check: what was missed otherwise; refused: judged by time and memory as well;
    judged: not where it is no attack, but what the defaults let a client ask"""

    name: str
    strike: Callable[[Target], list[Outcome]]
    expected: tuple[int | None, ...] = REFUSED
    refused: bool = True
    check: Callable[[Target], list[str]] | None = None
    judged: bool = True


@dataclass(frozen=True)
class Server:
    options: list[str]
    keys: tuple[str | None, str | None, str | None]
    attacks: list[Attack]


def body(path: str, make: Callable[[], bytes], num_clients: int = 1) -> Callable[[Target], list[Outcome]]:
    """An attack by one body, sent by so many clients at once."""

    def strike(target: Target) -> list[Outcome]:
        sent = make()

        def once(_: int) -> Outcome:
            begun = time.perf_counter()
            status = post(target.port, path, sent, target.key)
            return Outcome(status, len(sent), time.perf_counter() - begun, num_clients * len(sent))

        with ThreadPoolExecutor(num_clients) as pool:
            return list(pool.map(once, range(num_clients)))

    return strike


def asking(path: str, num_clients: int = 1, **fields: Any) -> Callable[[Target], list[Outcome]]:
    return body(path, lambda: json.dumps({"model": MODEL, **fields}).encode(), num_clients)


def filled(before: str, element: str, after: str, size: int) -> Callable[[], bytes]:
    """A body of about this size, by one element again and again."""

    def make() -> bytes:
        room = size - len(before) - len(after) - len(element)
        return (before + f"{element}," * (room // (len(element) + 1)) + element + after).encode()

    return make


def endless(
    begin: bytes | Callable[[Target], bytes], piece: bytes, most: int
) -> Callable[[Target], list[Outcome]]:
    """Send for ever until the server has enough; begin: bytes are without a key."""

    def strike(target: Target) -> list[Outcome]:
        begun, sent = time.perf_counter(), 0
        with connect(target.port) as client:
            try:
                client.sendall(begin(target) if callable(begin) else begin)
                while sent < most:
                    client.sendall(piece)
                    sent += len(piece)
            except OSError:
                pass
            status = status_of(client)
        return [Outcome(status, sent, time.perf_counter() - begun, sent)]

    return strike
