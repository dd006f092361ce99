"""One of several models: a `kvreclaim serve` in a process of its own, and requests to it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import httptools
from pydantic_core import from_json
from starlette.types import Message

from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.http.draining import LAST_BYTES_S
from kvreclaim.server.http.listener import LISTEN_FD, bind

PROGRAM = """
import json, os, signal, sys, threading
sys.argv = ["kvreclaim", "serve", *json.loads(sys.stdin.buffer.readline())]
watch = lambda: os.read(0, 1) or os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
from kvreclaim.cli.main import main
main()
"""
"""Reads its options, which may hold keys, from a pipe. Ends when the other end of the pipe closes."""

READ_BYTES = 1 << 16
LOOPBACK = "127.0.0.1"
LOST = (OSError, httptools.HttpParserError)
"""Errors of a connection whose process ends."""
OF_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
NOT_PASSED = OF_CONNECTION | {b"expect", b"content-length", b"host", b"origin", b"sec-fetch-site"}
"""Headers of requests that the gate in front of this server has dealt with."""
NOT_RETURNED = OF_CONNECTION | {b"date"}
Headers = Iterable[tuple[bytes, bytes]]


class Child:
    """The process of a loaded model. Its listening socket exists before it does, so requests wait there while
    the model loads.

    running:  requests that load or use it
    used_s:   time of the event loop when the last of them ended
    ready:    its entry of /v1/models, once the model is loaded. Raises: ApiError
    ended:    done when the process has ended, and on_end has been called with its exit code
    stopping: whether the end of the process is intended
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        port: int,
        key: str | None,
        on_end: Callable[[Child, int], None],
    ) -> None:
        self.name = name
        self.process = process
        self.port = port
        self.running = 0
        self.stopping = False
        self._own = [] if key is None else [(b"x-api-key", key.encode())]
        self.touch()
        self.ready = asyncio.create_task(self._until_ready())
        self.ready.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.ended = asyncio.create_task(self._until_end(on_end))

    @classmethod
    async def start(
        cls, name: str, arguments: Sequence[str], key: str | None, on_end: Callable[[Child, int], None]
    ) -> Child:
        """key: one that its operator routes accept."""
        with bind(LOOPBACK, 0) as listener:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", PROGRAM),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, LISTEN_FD: str(listener.fileno())},
                start_new_session=True,  # the terminal's ctrl-C goes to this process alone
            )
            port: int = listener.getsockname()[1]
        assert process.stdin is not None
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
        return cls(name, process, port, key, on_end)

    async def _until_ready(self) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = (await self.get(b"/v1/models"))["data"][0]
        except LOST:
            code = await self.end(LAST_BYTES_S)
            raise ApiError(
                503,
                f"model {self.name!r} did not start (exit code {code}); the server's log has the reason.",
            ) from None
        return entry

    async def _until_end(self, on_end: Callable[[Child, int], None]) -> None:
        on_end(self, await self.process.wait())

    @contextmanager
    def used(self) -> Iterator[None]:
        """Count a request."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.touch()

    def touch(self) -> None:
        self.used_s = asyncio.get_running_loop().time()

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and answers no request of this server."""
        return self.ready.done() and not self.running and not self.stopping

    async def is_free(self) -> bool:
        """Whether its engine runs nothing either, such as a response in the background."""
        try:
            load = await self.get(b"/load")
        except LOST:
            return True
        return bool(load.get("server_load") == 0)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    async def stop(self, timeout_s: float) -> None:
        """Let the requests end, and the process."""
        self.stopping = True
        with suppress(ProcessLookupError):
            self.process.terminate()
        await self.end(timeout_s)
        await asyncio.shield(self.ended)

    async def end(self, timeout_s: float) -> int:
        """Wait for the process to end, and end it after that time. Returns: its exit code."""
        try:
            return await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self.process.wait()

    async def get(self, path: bytes) -> Any:
        """Return the JSON of an answer. Raises: LOST."""
        async with aclosing(self.ask("GET", path, self._own)) as messages:
            return from_json(b"".join([message.get("body", b"") async for message in messages]))

    async def ask(
        self, method: str, target: bytes, headers: Headers, body: bytes = b""
    ) -> AsyncGenerator[Message, None]:
        """Yield the answer as messages of ASGI, as it comes. Closing the generator ends the request. Raises:
        LOST."""
        reader, writer = await asyncio.open_connection(LOOPBACK, self.port)
        try:
            passed = [(name, value) for name, value in headers if name not in NOT_PASSED]
            passed += [(b"host", b"%s:%d" % (LOOPBACK.encode(), self.port)), (b"connection", b"close")]
            if body or method != "GET":
                passed.append((b"content-length", b"%d" % len(body)))
            lines = [b"%s %s HTTP/1.1" % (method.encode(), target), *(b"%s: %s" % each for each in passed)]
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            answer = _Answer()
            while not answer.complete:
                data = await reader.read(READ_BYTES)
                if not data:
                    raise ConnectionResetError
                for message in answer.feed(data):
                    yield message
        finally:
            writer.close()


class _Answer:
    """An HTTP answer as it is parsed."""

    def __init__(self) -> None:
        self.complete = False
        self._headers: list[tuple[bytes, bytes]] | None = []
        self._messages: list[Message] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> list[Message]:
        self._parser.feed_data(data)
        new, self._messages = self._messages, []
        return new

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headers is not None and name.lower() not in NOT_RETURNED:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        start = {"type": "http.response.start", "status": status, "headers": self._headers}
        self._messages.append(start)
        self._headers = None  # trailers of a chunked body are ignored

    def on_body(self, body: bytes) -> None:
        self._messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        self._messages.append({"type": "http.response.body", "body": b"", "more_body": False})
        self.complete = True
