"""A minimal-cost client: it stores the bytes and parses them after the clock has stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from urllib.parse import urlsplit

from kvreclaim.errors import KVReclaimError

END = b"data: [DONE]\n\n"


class BrokenStreamError(KVReclaimError):
    """The server closed a stream before its end, or refused it."""


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """A greedy completion of exactly num_tokens tokens. at_s: send time, after the run's begin."""

    prompt: list[int]
    num_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A streamed answer: the text, its tokens as the server counts them, seconds from the request to its
    first piece, and between two pieces. A piece has one or more tokens."""

    text: str
    num_tokens: int
    first_s: float
    gaps_s: list[float]


class _Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, head: bytes, ended: asyncio.Future[None]) -> None:
        self.head = head
        self.ended = ended
        self.parts: list[bytes] = []
        self.times: list[float] = []
        self.sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent = perf_counter()
        transport.write(self.head)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        if b"data: " in data:
            self.times.append(perf_counter())
        if (END in data or END in b"".join(self.parts[-2:])) and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            seen = b"".join(self.parts)[:300].decode(errors="replace")
            self.ended.set_exception(BrokenStreamError(f"the server ended a stream early; it sent {seen!r}."))

    def parse(self) -> StreamedAnswer:
        """Parse the answer."""
        body = _unchunked(b"".join(self.parts))
        events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        num_tokens = next((event["usage"]["completion_tokens"] for event in events if event.get("usage")), 0)
        gaps = [after - before for before, after in pairwise(self.times)]
        return StreamedAnswer(text, num_tokens, self.times[0] - self.sent, gaps)


async def send_all(
    base_url: str, model: str, load: Sequence[TimedPrompt]
) -> tuple[list[StreamedAnswer], float]:
    """Send every request at its time. Returns: answers in order, seconds from the first to the last byte.
    Raises: BrokenStreamError, also for an answer of another length."""
    where = urlsplit(base_url)
    loop = asyncio.get_running_loop()

    async def one(item: TimedPrompt, begun: float) -> _Stream:
        if item.at_s:
            await asyncio.sleep(max(0.0, begun + item.at_s - perf_counter()))
        ended = loop.create_future()
        head = _head(where.netloc, model, item)
        transport, stream = await loop.create_connection(
            lambda: _Stream(head, ended), where.hostname or "", where.port or 80
        )
        try:
            await ended
        finally:
            transport.close()
        return stream

    begun = perf_counter()
    streams = await asyncio.gather(*(one(item, begun) for item in load))
    elapsed_s = max(stream.times[-1] for stream in streams) - min(stream.sent for stream in streams)
    answers = [stream.parse() for stream in streams]
    for item, answer in zip(load, answers, strict=True):
        if answer.num_tokens != item.num_tokens:
            raise BrokenStreamError(f"an answer has {answer.num_tokens} tokens, not {item.num_tokens}.")
    return answers, elapsed_s


def _head(host: str, model: str, item: TimedPrompt) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": item.prompt,
            "max_tokens": item.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _unchunked(answer: bytes) -> bytes:
    """The body of an answer with `transfer-encoding: chunked`."""
    body, rest = bytearray(), memoryview(answer[answer.index(b"\r\n\r\n") + 4 :])
    while len(rest):
        size, _, _ = bytes(rest[:16]).partition(b"\r\n")
        length, start = int(size, 16), len(size) + 2
        if not length:
            break
        body += rest[start : start + length]
        rest = rest[start + length + 2 :]
    return bytes(body)
