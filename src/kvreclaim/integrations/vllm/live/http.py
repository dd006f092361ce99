"""A server for the page alone: GET of a few files and of the feed, HTTP/1.1, one answer per connection.

So small that what it takes and what it holds can be read here: heads of at most 16 KiB within ten seconds, at
most 64 connections, no bodies, no keys, nothing that changes anything.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any

from kvreclaim.integrations.vllm.live.feed import PluginFeed
from kvreclaim.page.files import HEADERS, INDEX, static_files
from kvreclaim.page.hosts import is_own

MAX_HEAD_BYTES = 16 << 10
MAX_CONNECTIONS = 64
HEAD_S = 10.0
WRITE_S = 30.0
"""A viewer that takes nothing for so long is let go."""


class RefusedError(Exception):
    """status, and a sentence that says what to do."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class PageHttp:
    """Args:
    feed:     see there
    settings: what `/page/settings` says
    host:     the name or address that the operator gave; the page may be called by it
    """

    def __init__(self, feed: PluginFeed, settings: Mapping[str, Any], host: str) -> None:
        self._feed = feed
        self._settings = json.dumps(settings).encode()
        self._static = static_files(read_only=True)
        self._names = frozenset(name.lower() for name in ("localhost", socket.gethostname(), host))
        self._num_open = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end. Raises nothing but what cancels it."""
        self._num_open += 1
        try:
            with suppress(ConnectionError, TimeoutError):
                await self._answer(reader, writer)
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._num_open > MAX_CONNECTIONS:
                raise RefusedError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"{MAX_CONNECTIONS} connections are open; close some, or try later.",
                )
            path = self._check(await _head(reader))
            if path == "/page/feed":
                await self._stream(reader, writer)
                return
            headers, content = self._find(path)
            status = HTTPStatus.OK
        except RefusedError as error:
            status = error.status
            headers = {**HEADERS, "content-type": "application/json"}
            content = json.dumps({"error": {"message": str(error)}}).encode()
            if status is HTTPStatus.METHOD_NOT_ALLOWED:
                headers["allow"] = "GET"
        writer.write(_headed(status, {**headers, "content-length": str(len(content))}) + content)
        async with asyncio.timeout(WRITE_S):
            await writer.drain()

    def _check(self, head: bytes) -> str:
        """The path of a request that may be answered. Raises: RefusedError."""
        request, *lines = head.decode("latin-1").split("\r\n")
        parts = request.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "what came is no HTTP/1.1 request; check the client.")
        hosts = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("host:")]
        if not all(is_own(host, self._names) for host in hosts):
            raise RefusedError(
                HTTPStatus.FORBIDDEN,
                "the Host header names no host of this page; call it by its address, or name that host as "
                "page_host.",
            )
        if parts[0] != "GET":
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "the page is read only; send GET.")
        return parts[1].partition("?")[0]

    def _find(self, path: str) -> tuple[dict[str, str], bytes]:
        if path == "/page/settings":
            return {**HEADERS, "content-type": "application/json"}, self._settings
        prefix = "/page/static/"
        name = INDEX if path == "/" else path.removeprefix(prefix) if path.startswith(prefix) else ""
        file = self._static.get(name)
        if file is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "nothing is here; the page is at /.")
        return file.headers, file.content

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The feed, until the viewer goes. Raises: RefusedError."""
        if self._feed.is_full:
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, "too many pages watch; close one of them.")
        writer.write(_headed(HTTPStatus.OK, {**HEADERS, "content-type": "text/event-stream"}))
        gone = asyncio.ensure_future(_gone(reader))
        sent = asyncio.ensure_future(_send(self._feed.watch(), writer))
        try:
            await asyncio.wait((gone, sent), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, sent):
                task.cancel()
            await asyncio.gather(gone, sent, return_exceptions=True)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Request line and headers. Raises: RefusedError, ConnectionError."""
    try:
        async with asyncio.timeout(HEAD_S):
            return (await reader.readuntil(b"\r\n\r\n"))[:-4]
    except TimeoutError:
        raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, f"no whole request came in {HEAD_S:.0f} s.") from None
    except asyncio.LimitOverrunError:
        raise RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head exceeds {MAX_HEAD_BYTES} bytes."
        ) from None
    except asyncio.IncompleteReadError:
        raise ConnectionResetError from None


def _headed(status: HTTPStatus, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{n}: {v}" for n, v in headers.items())]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1")


async def _send(events: AsyncGenerator[bytes, None], writer: asyncio.StreamWriter) -> None:
    async with aclosing(events):
        async for chunk in events:
            writer.write(chunk)
            async with asyncio.timeout(WRITE_S):
                await writer.drain()


async def _gone(reader: asyncio.StreamReader) -> None:
    """Returns when the client has closed its side; what it sends is dropped."""
    with suppress(ConnectionError):
        while await reader.read(1024):
            pass
