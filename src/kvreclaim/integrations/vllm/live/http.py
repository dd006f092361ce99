"""The page's HTTP server: GET of a few files and of the feed, and limits of its connections.

A head may have 16 KiB and take ten seconds. There are at most 64 connections, one answer for each, no keys,
and nothing that changes anything.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import h11
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvreclaim.page.feed import Feed
from kvreclaim.page.files import HEADERS, INDEX, static_files
from kvreclaim.page.hosts import is_own

MAX_HEAD_BYTES = 16 << 10
MAX_CONNECTIONS = 64
HEAD_S = 10.0
WRITE_S = 30.0
"""A viewer that takes nothing for so long is let go."""
STATIC = "/page/static/"

failures = logging.getLogger("vllm.kvreclaim.page")
failures.setLevel(logging.ERROR)  # no line for each request that is none


class PageApp:
    """ASGI.

    Args:
        feed:     see there
        settings: of `/page/settings`; num_blocks among them
        host:     the name or address of the operator, which requests may use, too
    """

    def __init__(self, feed: Feed, settings: Mapping[str, Any], host: str) -> None:
        self._feed = feed
        self._settings = settings
        self._static = static_files(read_only=True)
        self._names = frozenset(name.lower() for name in ("localhost", socket.gethostname(), host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (answer := self._answer(Request(scope))) is not None:
            await answer(scope, receive, send)
            return
        headers = {**HEADERS, "content-type": "text/event-stream"}
        async with aclosing(self._feed.watch()) as events:
            await StreamingResponse(events, headers=headers)(scope, receive, send)

    def _answer(self, request: Request) -> Response | None:
        """None for the feed."""
        if not all(is_own(host, self._names) for host in request.headers.getlist("host")):
            return refusal(
                HTTPStatus.FORBIDDEN,
                "the Host header names no host of this page; call it by its address, or name that host as "
                "page_host.",
            )
        if request.method != "GET":
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, "the page is read only; send GET.", allow="GET")
        path: str = request.scope["path"]
        if path == "/page/feed":
            if not self._feed.is_full:
                return None
            return refusal(HTTPStatus.TOO_MANY_REQUESTS, "too many pages watch; close one of them.")
        if path == "/page/settings":
            return JSONResponse(self._settings, headers=HEADERS)
        name = INDEX if path == "/" else path.removeprefix(STATIC) if path.startswith(STATIC) else ""
        if (file := self._static.get(name)) is None:
            return refusal(HTTPStatus.NOT_FOUND, "nothing is here; the page is at /.")
        return Response(file.content, headers=file.headers)


class PageProtocol(H11Protocol):
    """uvicorn's protocol with limits on connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger, self.access_log = failures, False
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{MAX_CONNECTIONS} connections are open; close some, or try later.",
            )
        self.loop.call_later(HEAD_S, self._check_head)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # the body is wrong, and the answer has begun
            self.transport.abort()
        elif len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head exceeds {MAX_HEAD_BYTES} bytes."
            )
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request; check the client.")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _check_head(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"no whole request came in {HEAD_S:.0f} s.")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer bytes that are not a valid request, and close."""
        answer = refusal(status, message, connection="close")
        head = h11.Response(status_code=status, headers=answer.raw_headers, reason=status.phrase)
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def refusal(status: HTTPStatus, message: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status, {**HEADERS, **headers})
