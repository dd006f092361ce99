"""The engine in a thread of its own, for callers in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, TypeVar

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.engine.serving.core import EngineCore, EngineObserver, EngineOutputs
from kvreclaim.engine.serving.served import ServedModel

T = TypeVar("T")

MANY, SOON_S = 8, 0.004
"""Updates of at least MANY streams are delayed by SOON_S. By then the engine's thread runs native code, and
the two threads do not compete for the interpreter (measured in docs/log.md)."""


class AsyncEngine(EngineClient):
    """Serves many callers of one event loop from one LLM, which must not be used directly meanwhile.

    All calls to the engine run in its thread, between two steps.
    """

    def __init__(self, llm: LLM, observers: Sequence[EngineObserver] = ()) -> None:
        super().__init__(llm.loaded.tokenizer)
        self.llm = llm
        self.host = EngineCore(llm, observers)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: deque[EngineOutputs] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="kvreclaim-engine", daemon=True)

    @cached_property
    def served(self) -> ServedModel:  # cached, because it may read a file
        return ServedModel.of(self.llm)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        self.death = self.death or "it was shut down"
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self.host.abort(request_id))

    async def call(self, function: Callable[[EngineCore], T], *, allow_dead: bool = False) -> T:
        answer: Future[T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():  # the caller may have cancelled
                try:
                    if not allow_dead:
                        self._check_alive()
                    answer.set_result(function(self.host))
                except BaseException as error:
                    answer.set_exception(error)
                    if not isinstance(error, Exception):
                        raise  # the end of the engine

        if not allow_dead:
            self._check_alive()
        self._inbox.put(run)
        return await asyncio.wrap_future(answer)

    @property
    def _num_waiting(self) -> int:
        return self.host.num_waiting

    async def _add(self, news: Sequence[RequestSpec]) -> None:
        news = [await self._promised(new) for new in news]
        compressors = [await self._compressor(new.compression) for new in news]
        for grammar in (new.params.structured_outputs for new in news):
            if grammar is not None:
                await asyncio.to_thread(self.llm.make_grammar, grammar)
        await self.call(lambda host: host.add_all(news, compressors))

    async def _promised(self, new: RequestSpec) -> RequestSpec:
        """Return the request at its budget. For max_loss a file of statistics may have to be read."""
        if new.compression is None or new.compression.max_loss is None:
            return self.llm.promised(new)
        return await asyncio.to_thread(self.llm.promised, new)

    async def _compressor(self, config: CompressionConfig | None) -> Compressor | None:
        """Return a config's compressor. It is made where neither a step nor the event loop has to wait."""
        if config is None:
            return None
        return self.llm.compressors.kept(config) or await asyncio.to_thread(self.llm.compressor, config)

    def _serve(self) -> None:
        """Run the thread: handle commands, then run a step, as long as there is either. After the engine's
        death commands get an error."""
        while True:
            try:
                while self._inbox.qsize() or not self.host.has_work:
                    command = self._inbox.get()
                    if command is None:
                        self.host.abort_all()
                        self._pass_on()
                        self.host.close()
                        return
                    command()
                    self._pass_on()
                self.host.step()
            except BaseException as error:  # a library's panic is no Exception
                self.host.die(error)
                self.death = self.host.death
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass updates to the event loop, all requests at once."""
        if news := self.host.take():
            self._outbox.append(news)
            waits = len(news) >= MANY and self.host.has_work
            self._post(self._deliver_soon if waits else self._deliver_outbox)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        """Schedule a callback in the event loop, unless that is closed: a process may exit at once."""
        assert self._loop is not None, "start() comes first"
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def _deliver_soon(self) -> None:
        assert self._loop is not None, "start() comes first"
        self._loop.call_later(SOON_S, self._deliver_outbox)

    def _deliver_outbox(self) -> None:
        while self._outbox:
            self._deliver(self._outbox.popleft())
