"""uvicorn's server, ended by signals: what runs is answered, what comes is refused."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

logger = logging.getLogger(__name__)
LAST_BYTES_S = 2
"""Least seconds for clients to read what was written, also of truncated answers."""


class DrainingServer(uvicorn.Server):
    """Drains at the first signal, exits at the second.

    draining: set by the first signal; from then on new requests are refused
    """

    def __init__(self, config: uvicorn.Config, draining: asyncio.Event) -> None:
        super().__init__(config)
        self.draining = draining

    def left(self) -> str:
        """Describe what the server waits for, for the log."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Let running answers end, then set should_exit."""
        raise NotImplementedError

    def abandon(self) -> None:
        """End what would outlive this process, which exits at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; uvicorn would raise the first one again at the end, so that the process would not
        exit with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.draining.is_set():
            logger.warning("%s again: exiting at once", name)
            logging.shutdown()
            self.abandon()
            os._exit(128 + number)  # normal interpreter shutdown waits for threads
        again = "ctrl-C" if number == signal.SIGINT else name
        logger.info("%s: no new requests; %s; %s again ends the server at once", name, self.left(), again)
        self.draining.set()
        self._draining = asyncio.ensure_future(self.drain())
