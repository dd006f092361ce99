"""The page's thread: bound before the engine serves, gone with it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.live.feed import PluginFeed
from kvreclaim.integrations.vllm.live.http import MAX_HEAD_BYTES, PageHttp
from kvreclaim.integrations.vllm.live.recorder import Look, StepRecorder
from kvreclaim.integrations.vllm.page_address import PageAddress
from kvreclaim.page.frames import Snapshot

logger = logging.getLogger("vllm.kvreclaim")

STOP_S = 5.0


class PageServer:
    """Serves from the moment it is made until close().

    Args:
        address:  where
        settings: see PageHttp; num_blocks among them
        look, is_idle: see StepRecorder

    recorder: to be told of every step
    url:      of the page

    Raises: InvalidArgumentError where the address is not to be had.
    """

    def __init__(
        self, address: PageAddress, settings: Mapping[str, Any], look: Look, is_idle: Callable[[], bool]
    ) -> None:
        self._listener = bind(address)
        port = self._listener.getsockname()[1]
        self.url = f"http://{f'[{address.host}]' if ':' in address.host else address.host}:{port}/"
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._feed = PluginFeed(settings["num_blocks"])
        self._http = PageHttp(self._feed, settings, address.host)
        self.recorder = self._feed.recorder = StepRecorder(look, is_idle, self._deliver)
        self._thread = Thread(target=self._serve, name="kvreclaim-page", daemon=True)
        self._thread.start()
        logger.info("kvreclaim: the block pool is shown at %s", self.url)

    def close(self) -> None:
        """The engine ends: viewers are told, the port is free at return."""
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(STOP_S)

    def _deliver(self, snapshot: Snapshot) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._feed.take, snapshot)

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._until_stopped())
        except Exception:
            logger.exception("kvreclaim: the page has failed; the engine goes on")
        finally:
            self._loop.close()

    async def _until_stopped(self) -> None:
        server = await asyncio.start_server(self._http.connected, sock=self._listener, limit=MAX_HEAD_BYTES)
        await self._stopped.wait()
        server.close()
        self._feed.close()  # viewers that are told go by themselves
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if rest:
            await asyncio.wait(rest, timeout=1.0)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


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
