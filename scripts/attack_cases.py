"""The attacks: what each sends, and what it must be answered."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from attack_client import connect, get, head, post, posted, status_of, whole
from attack_kit import (
    CAP,
    KEYS,
    MAX_LEN,
    MODEL,
    Attack,
    Outcome,
    Server,
    Target,
    asking,
    body,
    endless,
    filled,
)

USER = '{"role":"user","content":"a"}'
SAID = f'{{"model":"{MODEL}","max_tokens":1,"messages":['
HOSTILE = {
    "wrong tokens": ("/detokenize", '{"tokens":[', '""', "]}"),
    "empty messages": ("/v1/chat/completions", SAID, "{}", "]}"),
    "empty blocks": ("/v1/messages", SAID + '{"role":"user","content":[', "{}", "]}]}"),
    "lists in a policy's option": (
        "/v1/completions",
        f'{{"model":"{MODEL}","prompt":"a","kv_compression":{{"policy":"knorm","options":{{"a":[',
        "[]",
        "]}}}",
    ),
    "one-character messages": ("/v1/chat/completions", SAID, USER, "]}"),
    "open brackets": ("/v1/chat/completions", "[", "[[[[[[[[", ""),
}


def hostile(size: int, suffix: str) -> list[Attack]:
    attacks = [
        Attack(f"{name}, {suffix}", body(path, filled(before, element, after, size)))
        for name, (path, before, element, after) in HOSTILE.items()
    ]

    def unknown() -> bytes:
        fields = ",".join(f'"x{number:07d}":1' for number in range(size // 13))
        return f'{{"model":"{MODEL}",{fields}}}'.encode()

    attacks.append(Attack(f"unknown fields, {suffix}", body("/v1/completions", unknown)))
    return attacks


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"


def trailer(target: Target) -> bytes:
    """Of a tenant: a stranger's is refused before its body is read."""
    fields = {"transfer_encoding": "chunked", "content_type": "application/json"}
    return head("POST", "/tokenize", target.key, **fields) + b"0\r\na: "


HEADS = (None, 400, 401, 403, 431)
MB = b"a" * 1_000_000

STRANGERS = [
    Attack("an endless header", endless(GET + b"a: ", MB, 118 << 20), HEADS),
    Attack("an endless URL", endless(b"GET /", MB, 118 << 20), HEADS),
    Attack("endless headers", endless(GET, b"a: b\r\n" * 100_000, 202 << 20), HEADS),
    Attack("an endless trailer", endless(trailer, MB, 118 << 20), HEADS),
]


def silence(target: Target) -> list[Outcome]:
    """1000 half-sent requests, half of them with a body begun, and 500 silent connections."""
    begun, clients = time.perf_counter(), []
    half = head(
        "POST", "/v1/completions", target.key, transfer_encoding="chunked", content_type="application/json"
    )
    for number in range(1500):
        try:
            client = connect(target.port)
            clients.append(client)
            if number < 500:
                client.sendall(half + b"5\r\n{")
            elif number < 1000:
                client.sendall(GET)
        except OSError:
            pass
    time.sleep(15.0)
    still = sum(1 for client in clients if is_open(client))
    for client in clients:
        client.close()
    # More than the server allows one client is a miss.
    return [Outcome(200 if still <= 128 else 500, 0, time.perf_counter() - begun, 0)]


def is_open(client: Any) -> bool:
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def forge(target: Target) -> list[Outcome]:
    path = "/x%0a2026-11-22T06:00:00.000+00:00%20INFO%20kvreclaim.access:%20FAKE%20LINE%1b[31mRED"
    begun = time.perf_counter()
    return [Outcome(get(target.port, path, None)[0], 0, time.perf_counter() - begun, 0)]


def no_forged_line(target: Target) -> list[str]:
    lines = target.log.read_text(errors="replace").splitlines()
    forged = [line for line in lines if line.startswith("2026-11-22T06:00:00.000+00:00") or "\x1b" in line]
    return ["the log has a line that a client wrote"] if forged else []


def odd_keys(target: Target) -> list[Outcome]:
    outcomes = []
    for value in ("Basic \xe9", "Basic \xff", "Bearer \xe9", "Basic 8J+Y", "Basic w6k="):
        begun = time.perf_counter()
        status, _ = get(target.port, "/v1/models", None, authorization=value)
        outcomes.append(Outcome(status, 0, time.perf_counter() - begun, 0))
    return outcomes


def no_traceback(target: Target) -> list[str]:
    return ["the log has a traceback"] if "Traceback" in target.log.read_text(errors="replace") else []


def redirect(target: Target) -> list[Outcome]:
    begun = time.perf_counter()
    with connect(target.port) as client:
        key = (target.operator_key or "").encode()
        client.sendall(b"GET /metrics/ HTTP/1.1\r\nhost: evil.example\r\nx-api-key: %s\r\n\r\n" % key)
        answer = client.recv(65_536)
    status = 500 if b"location:" in answer.lower() else int(answer.split(None, 2)[1])
    return [Outcome(status, 0, time.perf_counter() - begun, 0)]


def rebound(target: Target) -> list[Outcome]:
    begun = time.perf_counter()
    with connect(target.port) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: rebind.evil:80\r\n\r\n")
        status = status_of(client)
    return [Outcome(status, 0, time.perf_counter() - begun, 0)]


def finite_metrics(target: Target) -> list[str]:
    text = whole(target.port, "/metrics", target.operator_key)
    sums = [line for line in text.splitlines() if line.startswith(b"vllm:request_params_max_tokens_sum")]
    return [] if sums and b"Inf" not in sums[0] else [f"the sum of max_tokens is {sums}"]


def crowding(num_requests: int, num_prompts: int) -> Callable[[Target], list[Outcome]]:
    """As much as one key may have at once, for a few seconds."""

    def strike(target: Target) -> list[Outcome]:
        prompt = [[9 + (place + row) % 190 for place in range(64)] for row in range(num_prompts)]
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        sent = json.dumps(asked).encode()
        clients = [connect(target.port) for _ in range(num_requests)]
        options = {"content_type": "application/json", "content_length": str(len(sent))}
        for client in clients:
            client.sendall(head("POST", "/v1/completions", target.key, **options) + sent)
        time.sleep(4.0)
        for client in clients:
            client.settimeout(0.1)  # what has not begun by now is waiting
        outcomes = [
            Outcome(status_of(client), len(sent), 0.0, num_requests * len(sent)) for client in clients
        ]
        for client in clients:
            client.close()
        return outcomes

    return strike


def pins(target: Target) -> list[Outcome]:
    """Prompts of 1500 tokens to be kept for a day, as many as take the whole share of pins."""
    outcomes = []
    for row in range(5):
        asked = {
            "model": MODEL,
            "prompt": [9 + (place * (row + 3)) % 190 for place in range(1500)],
            "max_tokens": 1,
            "prompt_cache_retention": "24h",
        }
        begun, sent = time.perf_counter(), json.dumps(asked).encode()
        status = post(target.port, "/v1/completions", sent, target.key)
        outcomes.append(Outcome(status, len(sent), time.perf_counter() - begun, len(sent)))
    return outcomes


def another_keeps_its_pin(target: Target) -> list[str]:
    """Beside the attacker's pins, and through as many other prompts of the attacker as fill the pool."""
    mine = [9 + (place * 7 + 1) % 190 for place in range(800)]
    asked = {"model": MODEL, "prompt": mine, "max_tokens": 1, "prompt_cache_retention": "24h"}
    sent = json.dumps(asked).encode()
    post(target.port, "/v1/completions", sent, target.other_key)
    for row in range(20):
        filling = {"model": MODEL, "prompt": [9 + (place * (row + 11)) % 190 for place in range(1500)]}
        post(target.port, "/v1/completions", json.dumps({**filling, "max_tokens": 1}).encode(), target.key)
    cached = re.search(rb'"cached_tokens":(\d+)', posted(target.port, sent, target.other_key))
    return [] if cached and int(cached[1]) > 0 else ["another tenant's pinned prompt was given up"]


IDS = [9 + place % 190 for place in range(4000)]
TEXT = "lark shell dew mole nest "
SNAPKV = {"policy": "snapkv(window=1024)", "interval": 1, "budget": 2000}
TENANTS = [
    *hostile(16 << 20, "16 MB"),
    *hostile(CAP - 64, "as large as bodies may be"),
    Attack(
        "prompt_logprobs of 64 prompts",
        asking("/v1/completions", prompt=[IDS] * 64, max_tokens=1, prompt_logprobs=20),
    ),
    Attack(
        "echo and logprobs of 64 prompts",
        asking("/v1/completions", prompt=[IDS] * 64, max_tokens=1, echo=True, logprobs=20),
    ),
    Attack(
        "prompt_logprobs, as many as are allowed",
        asking("/v1/completions", prompt=IDS[:3000], max_tokens=1, prompt_logprobs=20),
        (200,),
        refused=False,
        judged=False,
    ),
    Attack("eight texts of 15 MB to /tokenize", asking("/tokenize", 8, prompt=TEXT * 600_000)),
    Attack("eight texts of 1 MB to /tokenize", asking("/tokenize", 8, prompt=TEXT * 40_000)),
    Attack(
        "eight texts to /tokenize, as long as are allowed",
        asking("/tokenize", 8, prompt=(TEXT * 6000)[: 32 * MAX_LEN - 1]),
        (200,),
        refused=False,
    ),
    Attack("a text of 15 MB", asking("/v1/completions", prompt=TEXT * 600_000)),
    Attack(
        "count_tokens of 8.8 MB",
        asking("/v1/messages/count_tokens", messages=[{"role": "user", "content": TEXT * 350_000}]),
    ),
    Attack(
        "a variable of 8 MB",
        asking(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "a"}],
            chat_template_kwargs={"x" * (8 << 20): 1},
        ),
    ),
    Attack(
        "a variable of 1 MB",
        asking(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "a"}],
            chat_template_kwargs={"x" * (1 << 20): 1},
        ),
    ),
    Attack(
        "logit_bias of 49,152 entries",
        asking(
            "/v1/messages",
            messages=[{"role": "user", "content": "a"}],
            max_tokens=40,
            logit_bias={str(i): 1 for i in range(49_152)},
        ),
    ),
    Attack(
        "snapkv(window=1024), interval 1",
        asking("/v1/completions", prompt=IDS[:3000], max_tokens=300, kv_compression=SNAPKV),
    ),
    Attack(
        "max_tokens of 308 digits",
        asking("/v1/completions", prompt="a", max_tokens=10**308, stop=["x"]),
        check=finite_metrics,
    ),
    Attack(
        "max_tokens of 400 digits",
        asking("/v1/completions", prompt="a", max_tokens=10**400),
        check=finite_metrics,
    ),
    Attack("a forged line of the log", forge, check=no_forged_line),
    Attack("odd keys", odd_keys, (401,), check=no_traceback),
    Attack("a redirect to a foreign host", redirect),
    Attack("1500 slow and silent connections", silence, (200,), refused=False),
]
ROOM = [
    Attack(
        "1024 prompts times 64",
        asking("/v1/completions", prompt=[[9, 10]] * 1024, n=64, max_tokens=4000, ignore_eos=True),
    ),
    Attack("as many outputs as one key may have", crowding(2, 256), (None, 200), refused=False),
    Attack(
        "priority -10**9", asking("/v1/completions", prompt=[[9, 10]] * 60, max_tokens=100, priority=-(10**9))
    ),
    Attack("all pins for a day", pins, (200,), refused=False, check=another_keeps_its_pin),
]

SERVERS = {
    "keys": Server(
        ["--api-key", KEYS[0], "--api-key", KEYS[1], "--operator-key", KEYS[2], "--log-format", "text"],
        KEYS,
        [*STRANGERS, *TENANTS],
    ),
    "small": Server(
        [
            *("--api-key", KEYS[0], "--api-key", KEYS[1], "--operator-key", KEYS[2]),
            *("--num-gpu-blocks-override", "600", "--scheduling-policy", "priority"),
            *("--max-concurrent-requests-per-key", "2"),
        ],
        KEYS,
        ROOM,
    ),
    "open": Server([], (None, None, None), [*STRANGERS, Attack("a foreign Host", rebound, (403,))]),
}
