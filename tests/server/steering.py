"""Holding a running server's engine still, and waiting for a condition in it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx2
import web
from running import Running
from web import LIMIT_S

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.serving.core import EngineCore


def until(condition: Callable[[], object]) -> None:
    """Return once it holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
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


@contextmanager
def stepping(server: Running, may: Callable[[], object]) -> Iterator[None]:
    """Let the engine handle every call, but step only where may() holds; its thread evaluates may()."""
    host = server.service.engine.host
    step = host.step

    def step_or_wait() -> None:
        if may():
            step()
        else:
            time.sleep(0.001)

    host.step = step_or_wait
    try:
        yield
    finally:
        host.step = step


@contextmanager
def halted(server: Running, num_tokens: int = 3, num_requests: int = 1) -> Iterator[Callable[[], None]]:
    """In the block the engine halts whenever every output has so many tokens, so that no answer ends by
    itself. Call the yielded function to wait until so many requests are there and have come so far."""
    halt = threading.Event()

    def may() -> bool:
        requests = server.llm.engine.requests.values()
        if any(seq.num_generated < num_tokens for request in requests for seq in request.sequences):
            return True
        if len(requests) >= num_requests:
            halt.set()
        return False

    def wait() -> None:
        assert halt.wait(LIMIT_S), "the engine did not get so far"

    with stepping(server, may):
        yield wait


@contextmanager
def read_at_once(server: Running) -> Iterator[None]:
    """Take no step before every reader has taken the last one's output: no chunk merges two steps."""
    engine = server.service.engine

    async def all_taken() -> bool:
        return not engine._outbox and all(reader._pending is None for reader in engine._streams.values())

    def may() -> bool:
        return asyncio.run_coroutine_threadsafe(all_taken(), server.loop).result(LIMIT_S)

    with stepping(server, may):
        yield


def pieces(llm: LLM, prompt: str, params: SamplingParams) -> list[str]:
    """The text of each step that brings text: what an answer's stream is made of if nothing is merged."""
    texts = ["", *(output.outputs[0].text for output in llm.stream(prompt, params))]
    return [after[len(before) :] for before, after in pairwise(texts) if after != before]


def blocks_in_use(server: Running) -> int:
    return server.llm.engine.memory.stats().in_use


def assert_empty(server: Running) -> None:
    """Nothing runs, and no request holds a block: as /load reports, and as the pool's own check finds."""
    engine = server.service.engine
    until(lambda: engine.num_requests == 0)
    checked = asyncio.run_coroutine_threadsafe(engine.call(_check), server.loop)
    checked.result(LIMIT_S)
    assert not engine.host._cursors
    assert not engine._streams


def _check(host: EngineCore) -> None:
    engine = host.engine
    engine.memory.check()
    stats = engine.memory.stats()
    assert stats.in_use == 0
    assert stats.free + stats.cached == stats.num_blocks
    assert not engine.requests
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running


class PendingRequest:
    """A request that a thread of its own sends."""

    def __init__(self, server: Running, path: str, body: dict[str, Any], key: str | None = None) -> None:
        self._server, self._path, self._body, self._key = server, path, body, key
        self._answer: httpx2.Response | None = None
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        self._answer = web.post(self._server.base_url + self._path, json=self._body, headers=headers)

    def answer(self) -> httpx2.Response:
        """Wait for it."""
        self._thread.join(LIMIT_S)
        assert self._answer is not None, "no answer came"
        return self._answer
