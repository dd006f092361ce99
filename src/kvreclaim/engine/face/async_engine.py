"""The engine in a thread of its own, for callers in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from kvreclaim.compression import CompressionConfig, Compressor
from kvreclaim.config import SamplingParams
from kvreclaim.engine.core.engine import Engine, StepResult
from kvreclaim.engine.core.request import Request
from kvreclaim.engine.face.llm import LLM
from kvreclaim.engine.face.stream import Cursor, RequestStream, Update
from kvreclaim.errors import EngineDeadError
from kvreclaim.memory.pins import Retention

logger = logging.getLogger(__name__)
T = TypeVar("T")

MANY, SOON_S = 8, 0.004
"""News of so many streams waits so long: by then the engine's thread is in native code of its next step.
At once, both threads would want the interpreter at the same time (docs/log.md has what was measured)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request before the engine has it.

    compression: None takes the LLM's own
    priority:    under the policy "priority" a lower number runs first
    retention:   how long the prompt's blocks are worth keeping
    tenant:      for whom: tenants get fair shares of the engine
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    compression: CompressionConfig | None = None
    priority: int = 0
    retention: tuple[Retention, ...] = ()
    tenant: str | None = None


class EngineObserver(Protocol):
    """Told what happens, in the engine's thread: it must be quick and may read the engine."""

    def added(self, engine: Engine, request: Request) -> None: ...

    def stepped(self, engine: Engine, result: StepResult) -> None: ...

    def ended(self, engine: Engine, request: Request) -> None: ...


class AsyncEngine:
    """Serves many callers of one event loop from one engine, which nobody else may touch meanwhile.

    Everything that concerns the engine runs in its thread, between two steps.

    death: why nothing is served any more, None while it is
    """

    def __init__(self, llm: LLM, observers: Sequence[EngineObserver] = ()) -> None:
        self.llm = llm
        self.observers = tuple(observers)
        self.death: str | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: deque[tuple[RequestStream, Update]] = deque()
        self._cursors: dict[str, Cursor] = {}  # the engine thread's
        self._streams: dict[str, RequestStream] = {}  # the event loop's
        self._num_adding = 0
        self._emptied = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="kvreclaim-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve; called in the event loop that will call everything else."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End every request and the thread; whoever calls later gets an EngineDeadError."""
        self.death = self.death or "it was shut down"
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def num_requests(self) -> int:
        """Requests that are being added or have not ended."""
        return self._num_adding + len(self._streams)

    @property
    def num_queued(self) -> int:
        """Requests that hold no blocks yet."""
        return self._num_adding + len(self.llm.engine.scheduler.waiting)

    async def add(self, new: NewRequest) -> RequestStream:
        """Queue a request. Raises what Engine.add_request raises, and EngineDeadError."""
        return (await self.add_all([new]))[0]

    async def add_all(self, news: Sequence[NewRequest]) -> list[RequestStream]:
        """Queue requests, all or none. Cancelled meanwhile, it leaves none in the engine."""
        self._num_adding += len(news)
        try:
            compressors = [await self._compressor(new.compression) for new in news]
            streams = await self.call(lambda engine: self._add_all(engine, news, compressors))
        except asyncio.CancelledError:
            for new in news:
                self.abort(new.request_id)
            raise
        finally:
            self._num_adding -= len(news)
            self._note_empty()
        self._streams |= {stream.request_id: stream for stream in streams if not stream.ended}
        return streams

    def abort(self, request_id: str) -> None:
        """End a request before the next step; one that has ended is none of our business any more."""
        self._inbox.put(lambda: self._abort(request_id))

    async def abort_all(self) -> None:
        """End every request; return once their readers have been told."""
        if self.death is None:
            await self.call(lambda _: self._abort_all())

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function in the engine's thread between two steps. Raises what it raises, EngineDeadError."""
        self._check_alive()
        answer: Future[T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():  # the caller may have gone
                try:
                    self._check_alive()
                    answer.set_result(function(self.llm.engine))
                except Exception as error:
                    answer.set_exception(error)

        self._inbox.put(run)
        return await asyncio.wrap_future(answer)

    async def drained(self) -> None:
        """Return once no request is left."""
        while self.num_requests:
            self._emptied.clear()
            await self._emptied.wait()

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDeadError(f"the engine has stopped ({self.death}); restart the server.")

    async def _compressor(self, config: CompressionConfig | None) -> Compressor | None:
        """Of one's own setting or the LLM's. Made where neither a step nor the event loop has to wait."""
        config = config if config is not None else self.llm.compression
        if config is None:
            return None
        return self.llm.compressors.kept(config) or await asyncio.to_thread(self.llm.compressor, config)

    def _add_all(
        self, engine: Engine, news: Sequence[NewRequest], compressors: Sequence[Compressor | None]
    ) -> list[RequestStream]:
        requests: list[Request] = []
        try:
            for new, compressor in zip(news, compressors, strict=True):
                request = engine.add_request(
                    new.request_id,
                    new.prompt_token_ids,
                    new.params,
                    compressor,
                    priority=new.priority,
                    retention=new.retention,
                    tenant=new.tenant,
                )
                requests.append(request)
        except BaseException:
            for request in requests:
                engine.abort(request.request_id)
            raise
        streams = [RequestStream(request) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            self._cursors[request.request_id] = Cursor(request, stream)
            self._tell("added", request)
        return streams

    def _abort(self, request_id: str) -> None:
        cursor = self._cursors.get(request_id)
        if cursor is not None and not cursor.request.finished:
            self.llm.engine.abort(request_id)
            self._pass_on([cursor.request])

    def _abort_all(self) -> None:
        for request_id in list(self._cursors):
            self._abort(request_id)

    def _serve(self) -> None:
        """The thread: commands, then a step, for as long as there is either. After the engine's death it
        answers commands with an error."""
        while True:
            try:
                while self._inbox.qsize() or self.death is not None or not self.llm.engine.has_unfinished:
                    command = self._inbox.get()
                    if command is None:
                        self._abort_all()
                        return
                    command()
                self._step(self.llm.engine)
            except Exception as error:
                self._die(error)

    def _step(self, engine: Engine) -> None:
        try:
            result = engine.step()
        except Exception as error:
            self._survive(engine, error)
            return
        self._tell("stepped", result)  # first: who has an answer finds it counted
        self._pass_on(result.requests)

    def _survive(self, engine: Engine, error: Exception) -> None:
        """A step failed as a whole: end what is in flight and go on, if the engine lets us."""
        ours = {request_id: cursor.request for request_id, cursor in self._cursors.items()}
        requests = {**engine.requests, **ours}  # ours alone: what ended in this very step
        logger.exception("an engine step failed; ending requests %s", list(requests))
        for request in requests.values():
            if not request.finished:
                request.error = f"{type(error).__name__}: {error}"
                engine.abort(request.request_id)
        self._pass_on(list(requests.values()))

    def _die(self, error: Exception) -> None:
        """Nothing can be relied on any more: tell everybody who waits."""
        logger.critical("the engine cannot go on", exc_info=error)
        self.death = type(error).__name__  # its words may quote a prompt; the log has them
        for cursor in self._cursors.values():
            cursor.request.error = cursor.request.error or f"{self.death}: {error}"
            self._outbox.append((cursor.stream, Update({}, finished=True, error=cursor.request.error)))
            self._tell("ended", cursor.request)
        self._cursors.clear()
        self._post(self._deliver)

    def _pass_on(self, requests: list[Request]) -> None:
        """Hand what is new to the event loop, all requests at once."""
        ended = []
        for request in requests:
            cursor = self._cursors.get(request.request_id)
            if cursor is None:
                continue
            update = cursor.advance()
            if update.finished:
                del self._cursors[request.request_id]
                ended.append(request)
            self._outbox.append((cursor.stream, update))
        for request in ended:
            self._tell("ended", request)
        if requests:
            waits = len(self._outbox) >= MANY and self.llm.engine.has_unfinished
            self._post(self._deliver_soon if waits else self._deliver)

    def _tell(self, event: Literal["added", "stepped", "ended"], fact: Request | StepResult) -> None:
        for observer in self.observers:
            try:
                getattr(observer, event)(self.llm.engine, fact)
            except Exception:
                logger.exception("%s failed", type(observer).__name__)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        """Have it called in the event loop, if that still runs: a process that exits at once leaves us."""
        assert self._loop is not None, "start() comes first"
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def _deliver_soon(self) -> None:
        assert self._loop is not None, "start() comes first"
        self._loop.call_later(SOON_S, self._deliver)

    def _deliver(self) -> None:
        """In the event loop: wake the readers."""
        while self._outbox:
            stream, update = self._outbox.popleft()
            stream.put(update)
            if update.finished:
                self._streams.pop(stream.request_id, None)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self.num_requests:
            self._emptied.set()
