"""Holding a running server's engine still, and waiting for what is to happen in it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from running import Running

LIMIT_S = 60.0
"""What is awaited happens long before; a test that gets here has failed."""


def until(condition: Callable[[], object]) -> None:
    """Return once it holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "what was awaited did not happen"
        time.sleep(0.002)


@contextmanager
def paused(server: Running) -> Iterator[None]:
    """The engine stands still between two steps; requests can be queued and given up meanwhile."""
    engine = server.service.engine
    inside, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        inside.set()
        go.wait(LIMIT_S)

    held = asyncio.run_coroutine_threadsafe(engine.call(hold), server.loop)
    assert inside.wait(LIMIT_S)
    try:
        yield
    finally:
        go.set()
        held.result(LIMIT_S)


def blocks_in_use(server: Running) -> int:
    return server.llm.engine.memory.stats().in_use


def assert_empty(server: Running) -> None:
    """Nothing runs, and no block is held by anybody: as /load says, and as the pool itself finds."""
    engine = server.service.engine
    until(lambda: engine.num_requests == 0)
    checked = asyncio.run_coroutine_threadsafe(engine.call(_check), server.loop)
    checked.result(LIMIT_S)
    assert not engine._cursors
    assert not engine._streams


def _check(engine: Any) -> None:
    engine.memory.check()
    stats = engine.memory.stats()
    assert stats.in_use == 0
    assert stats.free + stats.cached == stats.num_blocks
    assert not engine.requests
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running


class Asking:
    """A request on its way, in a thread of its own."""

    def __init__(self, server: Running, path: str, body: dict[str, Any], key: str | None = None) -> None:
        self._server, self._path, self._body, self._key = server, path, body, key
        self._answer: httpx2.Response | None = None
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        self._answer = httpx2.post(
            self._server.base_url + self._path, json=self._body, headers=headers, timeout=LIMIT_S
        )

    def answer(self) -> httpx2.Response:
        """Wait for it."""
        self._thread.join(LIMIT_S)
        assert self._answer is not None, "no answer came"
        return self._answer
