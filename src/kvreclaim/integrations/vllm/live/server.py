"""The page's thread, its feed and its HTTP server. It is bound before the engine serves, and ends with it.

The server answers GET of a few files and of the feed. A head may have 16 KiB and take ten seconds. There are
at most 64 connections, one answer for each, no keys, and nothing that changes anything.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from threading import Thread
from typing import Any

import h11
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.live.recorder import Look, StepRecorder
from kvreclaim.integrations.vllm.settings.page_address import PageAddress
from kvreclaim.page.feed import Feed
from kvreclaim.page.files import HEADERS, INDEX, static_files
from kvreclaim.page.frames import Compaction, Snapshot, frame_event
from kvreclaim.page.hosts import is_own
from kvreclaim.page.viewer import PERIOD_S, QUIET_S

SHARE = 0.02
"""Most of the time that is spent on reading the pool and writing frames, as a share."""
IDLE_S = 0.1
"""Seconds between checks whether requests have ended."""


class PluginFeed(Feed):
    """Lives in the page's loop. recorder: reads the pool"""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__(logger)
        self._recorder = recorder
        self._came: asyncio.Queue[Snapshot] = asyncio.Queue()
        self._unsent: list[Compaction] = []

    def take(self, snapshot: Snapshot) -> None:
        """Take the recorder's snapshot; runs in the event loop."""
        self._unsent += snapshot.compactions
        self._came.put_nowait(snapshot)

    def close(self) -> None:
        """End all feeds when the engine ends."""
        self._dismiss("draining")
        if self._task is not None:
            self._task.cancel()

    async def _read(self) -> str:
        self._recorder.watch(True)
        try:
            await self._show_all()
        finally:
            self._recorder.watch(False)
        return "draining"

    async def _show_all(self) -> None:
        last, event, sent_s = b"", b"", 0.0
        while self._viewers:
            snapshot = await self._next()
            began_s = time.perf_counter()
            news = False
            if snapshot is not None:
                body, frame = frame_event(snapshot)
                if news := body != last:
                    last, event = body, frame
            news = news or time.monotonic() - sent_s >= QUIET_S
            if news:
                sent_s = time.monotonic()
            passes, self._unsent = self._unsent, []
            self._show(event if news else None, passes)
            spent_s = time.perf_counter() - began_s + (snapshot.look_s if snapshot else 0.0)
            await asyncio.sleep(max(PERIOD_S, spent_s / SHARE))

    async def _next(self) -> Snapshot | None:
        """The pool after the next step, or as it is while there is none; None if neither comes in QUIET_S."""
        while not self._came.empty():  # of a step before; its compactions are kept
            self._came.get_nowait()
        self._recorder.request()
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._came.get(), IDLE_S)
            if (snapshot := self._recorder.look_idle()) is not None:
                self._unsent += snapshot.compactions
                return snapshot
        return None


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


logger = logging.getLogger("vllm.kvreclaim")

STOP_S = 5.0
LAST_BYTES_S = 1.0
"""Seconds that viewers have to read what was written for them."""


class PageServer(uvicorn.Server):
    """Serves from the moment it is made until close().

    Args:
        address:  where
        settings: see PageApp
        look, is_idle: see StepRecorder

    recorder: called at every step
    url:      of the page

    Raises: InvalidArgumentError where the address cannot be bound.
    """

    def __init__(
        self, address: PageAddress, settings: Mapping[str, Any], look: Look, is_idle: Callable[[], bool]
    ) -> None:
        listener = bind(address)
        port = listener.getsockname()[1]
        self.url = f"http://{f'[{address.host}]' if ':' in address.host else address.host}:{port}/"
        self._loop = asyncio.new_event_loop()
        self.recorder = StepRecorder(look, is_idle, self._deliver)
        self._feed = PluginFeed(self.recorder)
        super().__init__(
            uvicorn.Config(
                PageApp(self._feed, settings, address.host),
                http=PageProtocol,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                interface="asgi3",
                lifespan="off",
                log_config=None,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                headers=[("connection", "close")],
            )
        )
        self._thread = Thread(target=self._serve_page, args=(listener,), name="kvreclaim-page", daemon=True)
        self._thread.start()
        logger.info("kvreclaim: the block pool is shown at %s", self.url)

    def close(self) -> None:
        """The engine ends: viewers are notified, the port is free at return."""
        self.should_exit = True
        self._thread.join(STOP_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()  # notified viewers close their connections
        self._loop.call_later(LAST_BYTES_S, self._let_go)
        await super().shutdown(sockets)

    def _let_go(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, PageProtocol):
                connection.transport.abort()

    def _deliver(self, snapshot: Snapshot) -> None:
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._feed.take, snapshot)

    def _serve_page(self, listener: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self.serve([listener]))
        except Exception:
            logger.exception("kvreclaim: the page has failed; the engine goes on")
        finally:
            self._loop.close()


def bind(address: PageAddress) -> socket.socket:
    """A listening socket. Raises: InvalidArgumentError."""
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise InvalidArgumentError(
            f"the page cannot be served at page_host {address.host!r}, page_port {address.port} "
            f"({error.strerror or error}); name another port or host, or leave page_port out."
        ) from None
