"""The readers' side of an engine: one stream for each request, in one event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.core import EngineCore, EngineOutputs
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.engine.serving.stream import RequestStream, Update
from kvreclaim.errors import EngineDeadError
from kvreclaim.model.loader import Tokenizer

T = TypeVar("T")


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
