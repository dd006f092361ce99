"""Server-sent events, and detection of disconnected clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvreclaim.errors import KVReclaimError
from kvreclaim.page.frames import event
from kvreclaim.server.base.errors import ANTHROPIC_PREFIX, ApiError, error_body, failed, from_engine
from kvreclaim.server.base.identity import request_id_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

PIECE = 256
"""Elements of a list that are encoded at once: a few ms with 20 log-probabilities for each."""


def json_of(value: dict[str, Any]) -> bytes:
    """Encode an object that may be large in short pieces, because encoding holds the interpreter lock."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield b"{"
        for place, (name, each) in enumerate(value.items()):
            yield (b"," if place else b"") + to_json(name) + b":"
            yield from _pieces(each)
        yield b"}"
    elif isinstance(value, list) and len(value) > PIECE:
        yield b"["
        for start in range(0, len(value), PIECE):
            yield (b"," if start else b"") + to_json(value[start : start + PIECE])[1:-1]
        yield b"]"
    else:
        yield to_json(value)


class EventStream(Response):
    """Sends a generator's events as they come. The generator is closed when the client disconnects, so that
    its `finally` releases resources; an exception becomes the last event.

    first: the event that it has already yielded
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await or_disconnect(self._send_all(scope, send), receive)
        finally:
            await self._events.aclose()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = b""
        except Exception as error:
            last = error_event(error, scope)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def error_of(error: Exception, scope: Scope) -> ApiError:
    """Return the error that a client sees after its answer had begun; details are only logged."""
    if isinstance(error, KVReclaimError):
        return from_engine(error, scope["path"])
    if isinstance(error, ApiError):
        return error
    request_id = request_id_of(scope)
    logger.error("request %s failed", request_id, exc_info=error)
    return failed(request_id)


def error_event(error: Exception, scope: Scope) -> bytes:
    """Return the event of an error after the answer had begun, in the dialect of the path."""
    path = scope["path"]
    name = "error" if path.startswith(ANTHROPIC_PREFIX) else None
    return event(error_body(error_of(error, scope), path, request_id_of(scope)), name)


async def stream_events(events: AsyncGenerator[bytes, None], request: Request) -> Response:
    """Answer with events. Waits for the first one, so that an earlier error gets its own status."""

    async def begin() -> bytes:
        return await anext(events)

    first = await or_disconnect(begin(), request.receive)
    return gone() if first is None else EventStream(first, events)


async def answer_json(work: Coroutine[Any, Any, Any], request: Request) -> Response:
    """Answer with the work's result, encoded if it is not JSON yet; cancelled when the client disconnects."""
    body = await or_disconnect(work, request.receive)
    if body is None:
        return gone()
    return Response(body if isinstance(body, bytes) else to_json(body), media_type="application/json")


def gone() -> Response:
    """Response for a client that has disconnected."""
    return Response(status_code=499)


async def or_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Run to the end, or cancel at once when the client disconnects (then: None).

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
