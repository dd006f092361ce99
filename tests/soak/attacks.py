"""The attacks: what each sends, and what it must be answered."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from socket import socket
from typing import Any

from client import answer, connect, exchange, head, post, request_body, status
from server import ATTACKER, KEYED, MODEL, OPERATOR, OTHER, Target

MAX_LEN = 4096
CAP = (256 << 10) + 32 * MAX_LEN
"""Most bytes of a body, where the server's defaults hold."""
REFUSED = (400, 401, 403, 404, 408, 413, 429, 431)
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"


@dataclass(frozen=True)
class Outcome:
    """One request. sent: its bytes; together: of all that were sent with it at once"""

    status: int | None
    sent: int = 0
    elapsed_s: float = 0.0
    together: int = 0


Strike = Callable[[Target], list[Outcome]]


@dataclass(frozen=True)
class Attack:
    """strike: attack once; check: what was missed otherwise; refused: judged by time and memory as well;
    growth: most bytes by which memory may grow, where it is not refused
    judged: not where it is no attack, but what the defaults let a client send"""

    name: str
    strike: Strike
    expected: tuple[int | None, ...] = REFUSED
    refused: bool = True
    growth: int | None = None
    check: Callable[[Target], list[str]] | None = None
    judged: bool = True


@dataclass(frozen=True)
class Server:
    options: list[str]
    attacks: list[Attack]


def timed(work: Callable[[], bytes], sent: int = 0, together: int = 0) -> Outcome:
    begun = time.perf_counter()
    response = work()
    return Outcome(status(response), sent, time.perf_counter() - begun, together)


def posting(path: str, make: Callable[[], bytes], num_clients: int = 1) -> Strike:
    """One body, sent by so many clients at once."""

    def strike(target: Target) -> list[Outcome]:
        body = make()
        send = partial(exchange, target.port, post(path, target.key(ATTACKER), body))
        with ThreadPoolExecutor(num_clients) as pool:
            return [*pool.map(lambda _: timed(send, len(body), num_clients * len(body)), range(num_clients))]

    return strike


def submit(path: str, num_clients: int = 1, **fields: Any) -> Strike:
    return posting(path, lambda: request_body(**fields), num_clients)


def sending(method: str, path: str, key: str | None = None, **headers: str) -> Strike:
    """One request without a body."""
    return lambda target: [timed(lambda: exchange(target.port, head(method, path, key, **headers)))]


def filled(before: str, element: str, after: str, size: int) -> bytes:
    """A body of about this size, by one element again and again."""
    room = size - len(before) - len(after) - len(element)
    return (before + f"{element}," * (room // (len(element) + 1)) + element + after).encode()


def endless(begin: Callable[[Target], bytes], piece: bytes, most: int) -> Strike:
    """Send for ever until the server has enough."""

    def strike(target: Target) -> list[Outcome]:
        begun, sent = time.perf_counter(), 0
        with connect(target.port) as client:
            try:
                client.sendall(begin(target))
                while sent < most:
                    client.sendall(piece)
                    sent += len(piece)
            except OSError:
                pass
            response = answer(client)
        return [Outcome(status(response), sent, time.perf_counter() - begun, sent)]

    return strike


MESSAGES_HEAD = f'{{"model":"{MODEL}","max_tokens":1,"messages":['
OPTIONS = f'{{"model":"{MODEL}","prompt":"a","kv_compression":{{"policy":"knorm","options":{{"a":['
HOSTILE = {
    "wrong tokens": ("/detokenize", '{"tokens":[', '""', "]}"),
    "empty messages": (CHAT, MESSAGES_HEAD, "{}", "]}"),
    "empty blocks": (MESSAGES, MESSAGES_HEAD + '{"role":"user","content":[', "{}", "]}]}"),
    "lists in a policy's option": (COMPLETIONS, OPTIONS, "[]", "]}}}"),
    "one-character messages": (CHAT, MESSAGES_HEAD, '{"role":"user","content":"a"}', "]}"),
    "open brackets": (CHAT, "[", "[[[[[[[[", ""),
}


def unknown_fields(size: int) -> bytes:
    fields = ",".join(f'"x{number:07d}":1' for number in range(size // 13))
    return f'{{"model":"{MODEL}",{fields}}}'.encode()


def hostile(size: int, suffix: str) -> list[Attack]:
    attacks = [
        Attack(f"{name}, {suffix}", posting(path, partial(filled, *parts, size)))
        for name, (path, *parts) in HOSTILE.items()
    ]
    unknown = posting(COMPLETIONS, partial(unknown_fields, size))
    return [*attacks, Attack(f"unknown fields, {suffix}", unknown)]


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = {"transfer_encoding": "chunked", "content_type": "application/json"}


def trailer(target: Target) -> bytes:
    """Return the head of a tenant's request: a stranger's is refused before its body is read."""
    return head("POST", "/tokenize", target.key(ATTACKER), **CHUNKED) + b"0\r\na: "


HEADS = (None, 400, 401, 403, 431)
MB = b"a" * 1_000_000
STRANGERS = [
    Attack("an endless header", endless(lambda _: GET + b"a: ", MB, 118 << 20), HEADS),
    Attack("an endless URL", endless(lambda _: b"GET /", MB, 118 << 20), HEADS),
    Attack("endless headers", endless(lambda _: GET, b"a: b\r\n" * 100_000, 202 << 20), HEADS),
    Attack("an endless trailer", endless(trailer, MB, 118 << 20), HEADS),
]


def silence(target: Target) -> list[Outcome]:
    """1000 half-sent requests, half of them with a body begun, and 500 silent connections."""
    begun, clients = time.perf_counter(), []
    half = head("POST", COMPLETIONS, target.key(ATTACKER), **CHUNKED) + b"5\r\n{"
    for number in range(1500):
        try:
            clients.append(connect(target.port))
            if number < 1000:
                clients[-1].sendall(half if number < 500 else GET)
        except OSError:
            pass
    time.sleep(15.0)
    still = sum(map(is_open, clients))
    for client in clients:
        client.close()
    # More than the server allows one client is a miss.
    return [Outcome(200 if still <= 128 else 500, 0, time.perf_counter() - begun)]


def is_open(client: socket) -> bool:
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


FORGED = "2026-11-22T06:00:00.000+00:00"
FORGERY = f"/x%0a{FORGED}%20INFO%20kvreclaim.access:%20FAKE%20LINE%1b[31mRED"


def no_forged_line(target: Target) -> list[str]:
    lines = target.log.read_text(errors="replace").splitlines()
    forged = any(line.startswith(FORGED) or "\x1b" in line for line in lines)
    return ["the log has a line that a client wrote"] if forged else []


def odd_keys(target: Target) -> list[Outcome]:
    values = ("Basic \xe9", "Basic \xff", "Bearer \xe9", "Basic 8J+Y", "Basic w6k=")
    return [sending("GET", "/v1/models", authorization=value)(target)[0] for value in values]


def no_traceback(target: Target) -> list[str]:
    return ["the log has a traceback"] if "Traceback" in target.log.read_text(errors="replace") else []


def redirect(target: Target) -> list[Outcome]:
    request = head("GET", "/metrics/", None, host="evil.example", x_api_key=OPERATOR)
    response = exchange(target.port, request)
    return [Outcome(500 if b"location:" in response.lower() else status(response))]


def finite_metrics(target: Target) -> list[str]:
    request = head("GET", "/metrics", target.key(OPERATOR), connection="close")
    text = exchange(target.port, request, whole=True)
    sums = [line for line in text.splitlines() if line.startswith(b"vllm:request_params_max_tokens_sum")]
    return [] if sums and b"Inf" not in sums[0] else [f"the sum of max_tokens is {sums}"]


def ids(count: int, step: int = 1, first: int = 0) -> list[int]:
    return [9 + (first + place * step) % 190 for place in range(count)]


def crowding(target: Target) -> list[Outcome]:
    """Send as much as one key may have at once, for a few seconds."""
    prompts = [ids(64, first=row) for row in range(256)]
    body = request_body(prompt=prompts, max_tokens=2000, ignore_eos=True, stream=True)
    clients = [connect(target.port) for _ in range(2)]
    for client in clients:
        client.sendall(post(COMPLETIONS, target.key(ATTACKER), body))
    time.sleep(4.0)
    outcomes = []
    for client in clients:
        client.settimeout(0.1)  # what has not begun by now is waiting
        outcomes.append(Outcome(status(answer(client)), len(body), 0.0, 2 * len(body)))
        client.close()
    return outcomes


def kept_for_a_day(prompt: list[int]) -> bytes:
    return request_body(prompt=prompt, max_tokens=1, prompt_cache_retention="24h")


def pins(target: Target) -> list[Outcome]:
    """Prompts of 1500 tokens to be kept for a day, as many as take the whole share of pins."""
    bodies = [partial(kept_for_a_day, ids(1500, row + 3)) for row in range(5)]
    return [posting(COMPLETIONS, body)(target)[0] for body in bodies]


def another_keeps_its_pin(target: Target) -> list[str]:
    """Beside the attacker's pins, and through as many other prompts of the attacker as fill the pool."""
    mine = post(COMPLETIONS, target.key(OTHER), kept_for_a_day(ids(800, 7, 1)), connection="close")
    exchange(target.port, mine, whole=True)
    for row in range(20):
        submit(COMPLETIONS, prompt=ids(1500, row + 11), max_tokens=1)(target)
    cached = re.search(rb'"cached_tokens":(\d+)', exchange(target.port, mine, whole=True))
    return [] if cached and int(cached[1]) > 0 else ["another tenant's pinned prompt was given up"]


IDS = ids(4000)
TEXT = "lark shell dew mole nest "
USER = [{"role": "user", "content": "a"}]
MANY = [{"role": "user", "content": TEXT * 350_000}]
ALLOWED: dict[str, Any] = {"expected": (200,), "refused": False}
SNAPKV = {"policy": "snapkv(window=1024)", "interval": 1, "budget": 2000}
COMPLETING: dict[str, dict[str, Any]] = {
    "prompt_logprobs of 64 prompts": {"prompt": [IDS] * 64, "max_tokens": 1, "prompt_logprobs": 20},
    "echo and logprobs of 64 prompts": {"prompt": [IDS] * 64, "max_tokens": 1, "echo": True, "logprobs": 20},
    "a text of 15 MB": {"prompt": TEXT * 600_000},
    "snapkv(window=1024), interval 1": {"prompt": IDS[:3000], "max_tokens": 300, "kv_compression": SNAPKV},
}
BIAS = {str(token): 1 for token in range(49_152)}
TENANTS = [
    *hostile(16 << 20, "16 MB"),
    *hostile(CAP - 64, "as large as bodies may be"),
    *(Attack(name, submit(COMPLETIONS, **fields)) for name, fields in COMPLETING.items()),
    Attack(
        "prompt_logprobs, as many as are allowed",
        submit(COMPLETIONS, prompt=IDS[:3000], max_tokens=1, prompt_logprobs=20),
        **ALLOWED,
        judged=False,
    ),
    Attack("eight texts of 15 MB to /tokenize", submit("/tokenize", 8, prompt=TEXT * 600_000)),
    Attack("eight texts of 1 MB to /tokenize", submit("/tokenize", 8, prompt=TEXT * 40_000)),
    Attack(
        "eight texts to /tokenize, as long as are allowed",
        submit("/tokenize", 8, prompt=(TEXT * 6000)[: 32 * MAX_LEN - 1]),
        **ALLOWED,
    ),
    Attack("count_tokens of 8.8 MB", submit("/v1/messages/count_tokens", messages=MANY)),
    *(
        Attack(
            f"a variable of {mb} MB", submit(CHAT, messages=USER, chat_template_kwargs={"x" * (mb << 20): 1})
        )
        for mb in (8, 1)
    ),
    Attack("logit_bias of 49,152 entries", submit(MESSAGES, messages=USER, max_tokens=40, logit_bias=BIAS)),
    Attack(
        "max_tokens of 308 digits",
        submit(COMPLETIONS, prompt="a", max_tokens=10**308, stop=["x"]),
        check=finite_metrics,
    ),
    Attack(
        "max_tokens of 400 digits",
        submit(COMPLETIONS, prompt="a", max_tokens=10**400),
        check=finite_metrics,
    ),
    Attack("a forged line of the log", sending("GET", FORGERY), check=no_forged_line),
    Attack("odd keys", odd_keys, (401,), check=no_traceback),
    Attack("a redirect to a foreign host", redirect),
    Attack("1500 slow and silent connections", silence, **ALLOWED),
]
ROOM = [
    Attack(
        "1024 prompts times 64",
        submit(COMPLETIONS, prompt=[[9, 10]] * 1024, n=64, max_tokens=4000, ignore_eos=True),
    ),
    Attack("as many outputs as one key may have", crowding, (None, 200), refused=False),
    Attack("priority -10**9", submit(COMPLETIONS, prompt=[[9, 10]] * 60, max_tokens=100, priority=-(10**9))),
    Attack("all pins for a day", pins, **ALLOWED, check=another_keeps_its_pin),
]
REBOUND = sending("GET", "/v1/models", host="rebind.evil:80")
SMALL = ["--num-gpu-blocks-override", "600", "--scheduling-policy", "priority"]
SERVERS = {
    "keys": Server(KEYED, [*STRANGERS, *TENANTS]),
    "small": Server([*KEYED, *SMALL, "--max-concurrent-requests-per-key", "2"], ROOM),
    "open": Server([], [*STRANGERS, Attack("a foreign Host", REBOUND, (403,))]),
}
