"""The page's thread. It is bound before the engine serves, and ends with it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

import uvicorn

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.live.feed import PluginFeed
from kvreclaim.integrations.vllm.live.http import MAX_HEAD_BYTES, PageApp, PageProtocol
from kvreclaim.integrations.vllm.live.recorder import Look, StepRecorder
from kvreclaim.integrations.vllm.settings.page_address import PageAddress
from kvreclaim.page.frames import Snapshot

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
