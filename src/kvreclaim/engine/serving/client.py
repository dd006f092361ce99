"""The readers' side of an engine: one stream of updates for each request in one event loop, and an engine
in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import FinishReason, RequestMetrics
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.core import EngineCore, EngineObserver, EngineOutputs, PromptReports, Update
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.errors import EngineDeadError
from kvreclaim.model.loader import Tokenizer

T = TypeVar("T")


class RequestStream:
    """A request's updates, for one reader in the event loop.

    A slow reader gets several steps in one update. It delays no other request, and needs no more memory than
    its outputs.

    new:             the request
    ended:           whether the last update has arrived
    prompt_logprobs: set from the first update on, if requested
    finish_reasons:  of the outputs that have ended, by index
    """

    def __init__(self, new: RequestSpec) -> None:
        self.new = new
        self.ended = False
        self.prompt_logprobs: PromptReports | None = None
        self.finish_reasons: dict[int, FinishReason] = {}
        self._metrics = RequestMetrics(num_prompt_tokens=len(new.prompt_token_ids))
        self._num_generated = 0
        self._texts: dict[int, list[str]] = {}
        self._pending: Update | None = None
        self._arrived = asyncio.Event()
        self._finished = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.new.request_id

    @property
    def metrics(self) -> RequestMetrics:
        """The metrics so far: final once the stream has ended; before that, those of the first update with
        the current number of generated tokens."""
        if self.ended:
            return self._metrics
        return replace(self._metrics, num_generated_tokens=self._num_generated)

    @property
    def texts(self) -> list[str]:
        """The text of every output so far."""
        return ["".join(self._texts.get(index, ())) for index in range(self.new.params.n)]

    def put(self, update: Update) -> None:
        """Add an update. Called in the event loop."""
        self.ended = update.finished
        self._metrics = update.metrics or self._metrics
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        for delta in update.deltas.values():
            self._num_generated += len(delta.token_ids)
            self._texts.setdefault(delta.index, []).append(delta.text)
            if delta.finish_reason is not None:
                self.finish_reasons[delta.index] = delta.finish_reason
        if self._pending is None:
            self._pending = update
        else:
            self._pending.extend(update)
        self._arrived.set()
        if update.finished:
            self._finished.set()

    async def next(self) -> Update:
        """Wait for the next update and return it."""
        await self._arrived.wait()
        self._arrived.clear()
        update, self._pending = self._pending, None
        assert update is not None, f"request {self.request_id} woke its reader without an update"
        return update

    async def rest(self) -> Update:
        """Wait until the request has ended, and return all of its remaining updates as one."""
        await self._finished.wait()
        return await self.next()

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Yield every update; the last one is finished."""
        while True:
            update = await self.next()
            yield update
            if update.finished:
                return


class EngineClient(ABC):
    """Serves many callers of one event loop with one engine that runs elsewhere.

    pid:       of the engine's process; None if the engine runs in this process
    tokenizer: a copy for this side; None for a model without one
    death:     reason why the engine has stopped; None while it serves. lost: set when its process has ended
    """

    def __init__(self, tokenizer: Tokenizer | None, pid: int | None = None) -> None:
        self.pid = pid
        self.tokenizer = tokenizer
        self.death: str | None = None
        self.lost = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._num_adding = 0
        self._emptied = asyncio.Event()

    @property
    @abstractmethod
    def served(self) -> ServedModel:
        """The engine's model and limits."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.served.name

    @abstractmethod
    def start(self) -> None:
        """Begin to serve; called in the event loop that will call everything else."""

    @abstractmethod
    async def stop(self) -> None:
        """End every request and the engine. Later calls raise EngineDeadError."""

    @abstractmethod
    async def call(self, function: Callable[[EngineCore], T], *, allow_dead: bool = False) -> T:
        """Run a function where the engine runs, between two steps. For another process it must be a
        module-level function with a picklable result. Raises: its exceptions, EngineDeadError.

        allow_dead: also run it when the engine has failed, as long as its process or thread answers
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request before the next step. A request that has ended is ignored."""

    @property
    @abstractmethod
    def _num_waiting(self) -> int:
        """Requests in the engine's queue."""

    @abstractmethod
    async def _add(self, news: Sequence[RequestSpec]) -> None:
        """Queue the requests in the engine, all or none."""

    @property
    def num_requests(self) -> int:
        """Requests that are being added or have not ended."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Requests that hold no blocks yet."""
        return self._num_adding + self._num_waiting

    async def add(self, new: RequestSpec) -> RequestStream:
        """Queue a request. Raises what Engine.add raises, and EngineDeadError."""
        return (await self.add_all([new]))[0]

    async def add_all(self, news: Sequence[RequestSpec]) -> list[RequestStream]:
        """Queue requests, all or none. Cancelled meanwhile, it leaves none in the engine."""
        self._check_alive()
        streams = [RequestStream(new) for new in news]
        self._streams |= {stream.request_id: stream for stream in streams}
        self._num_adding += len(news)
        try:
            await self._add(news)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                for new in news:
                    self.abort(new.request_id)
            for new in news:
                self._streams.pop(new.request_id, None)
            raise
        finally:
            self._num_adding -= len(news)
            self._note_empty()
        return streams

    async def abort_all(self) -> None:
        """End every request. Return once their streams have the last update."""
        if self.death is None:
            await self.call(EngineCore.abort_all)

    async def drained(self) -> None:
        """Return once no request is left."""
        while self.num_requests:
            self._emptied.clear()
            await self._emptied.wait()

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(f"the engine has stopped ({self.death}); restart the server.")

    def _deliver(self, news: EngineOutputs) -> None:
        """Put updates into their streams."""
        for request_id, update in news:
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # its caller has disconnected
            stream.put(update)
            if update.finished:
                del self._streams[request_id]
        self._note_empty()

    def _end_all(self, reason: str) -> None:
        """End all streams with an error."""
        self.death = self.death or reason
        self._deliver([(name, Update({}, finished=True, error=reason)) for name in self._streams])

    def _note_empty(self) -> None:
        if not self.num_requests:
            self._emptied.set()


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
        for new in news:
            for prepare in self.llm.engine.factory.preparations(new):
                await asyncio.to_thread(prepare)
        await self.call(lambda host: host.add_all(news, compressors))

    async def _promised(self, new: RequestSpec) -> RequestSpec:
        """Return the request at its budget. For max_loss a file of statistics may have to be read."""
        if new.compression is None and self.llm.compression is None:
            return new
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
