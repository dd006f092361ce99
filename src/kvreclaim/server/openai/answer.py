"""From a request that has been checked to its answer: whole, or as events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, ClassVar

from pydantic_core import to_json
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvreclaim.engine.core.outputs import RequestMetrics
from kvreclaim.engine.core.request import Request
from kvreclaim.engine.face.stream import OutputDelta
from kvreclaim.server.events import answer_json, event, stream_events
from kvreclaim.server.ids import answer_id
from kvreclaim.server.openai.fields import GenerationFields, StreamOptions
from kvreclaim.server.openai.logprobs import Vocabulary
from kvreclaim.server.openai.run import collect, updates
from kvreclaim.server.service import Prompt, Service
from kvreclaim.server.usage import token_usage, usage_of


class Answer(ABC):
    """One HTTP request's way through the engine.

    kind, chunk_kind: `object` of the whole answer and of a chunk
    """

    route: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, fields: GenerationFields, service: Service, request_id: str, prompts: list[Prompt]
    ) -> None:
        self.fields = fields
        self.service = service
        self.request_id = request_id
        self.response_id = answer_id(request_id, self.route)
        self.prompts = prompts
        self.options = fields.stream_options or StreamOptions()
        self.vocabulary = Vocabulary(service.engine.llm.tokenizer)
        self._created = int(time.time())
        self._metrics: dict[int, RequestMetrics] = {}
        self._num_generated = 0
        self._begun: set[int] = set()
        self._chunk_head: bytes | None = None

    async def respond(self, request: HTTPRequest) -> Response:
        if self.fields.stream:
            return await stream_events(self._events(), request)
        return await answer_json(self._whole(), request)

    @abstractmethod
    def choice(self, index: int, delta: OutputDelta, request: Request) -> dict[str, Any]:
        """The whole of one output. index: among the outputs of all prompts."""

    @abstractmethod
    def chunk_choices(
        self, index: int, delta: OutputDelta, request: Request, *, first: bool
    ) -> list[dict[str, Any]]:
        """What is to be told of one output's news, one chunk each; none while there is nothing to tell."""

    def extras(self, request: Request) -> dict[str, Any]:
        """Further fields of a whole answer and of an output's first chunk, for a request with one prompt."""
        return {}

    def take(self, delta: OutputDelta) -> OutputDelta:
        """News of an output as they are told."""
        return delta

    def usage(self) -> dict[str, Any]:
        """Of everything, at the end."""
        return usage_of([self._metrics[place] for place in sorted(self._metrics)])

    async def _whole(self) -> dict[str, Any]:
        async with self.service.submit(self.request_id, self.prompts) as streams:
            ended = await collect(streams)
        choices = []
        for place, update in enumerate(ended):
            assert update.metrics is not None, "the last update has metrics"
            self._metrics[place] = update.metrics
            for delta in sorted(update.deltas.values(), key=lambda delta: delta.index):
                told, index = self.take(delta), self._index(place, delta)
                choices.append(self.choice(index, told, streams[place].request))
        more = self.extras(streams[0].request)
        return {**self._head(self.kind), "choices": choices, **more, "usage": self.usage()}

    async def _events(self) -> AsyncGenerator[bytes, None]:
        submitted = self.service.submit(self.request_id, self.prompts)
        async with submitted as streams, aclosing(updates(streams)) as news:
            async for place, update in news:
                if update.metrics is not None:
                    self._metrics[place] = update.metrics
                chunks = [
                    self._chunk(choice, more)
                    for delta in update.deltas.values()
                    for choice, more in self._news(
                        self._index(place, delta), self.take(delta), streams[place].request
                    )
                ]
                if chunks:
                    yield b"".join(chunks)
        if self.options.include_usage:
            yield event({**self._head(self.chunk_kind), "choices": [], "usage": self.usage()})
        yield event("[DONE]")

    def _news(
        self, index: int, delta: OutputDelta, request: Request
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The choices of an output's next chunks, each with what stands beside `choices`."""
        first = index not in self._begun
        self._begun.add(index)
        self._num_generated += len(delta.token_ids)
        for choice in self.chunk_choices(index, delta, request, first=first):
            more = self.extras(request) if first else {}
            first = False
            if self.options.continuous_usage_stats:
                more["usage"] = token_usage(list(self._metrics.values()), self._num_generated)
            elif self.options.include_usage:
                more["usage"] = None
            yield choice, more

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        """As `event` would write it; what all chunks begin with is made once."""
        if self._chunk_head is None:
            self._chunk_head = b"data: " + to_json(self._head(self.chunk_kind))[:-1] + b',"choices":['
        tail = b"]," + to_json(more)[1:] if more else b"]}"
        return self._chunk_head + to_json(choice) + tail + b"\n\n"

    def _index(self, place: int, delta: OutputDelta) -> int:
        return place * (self.fields.n or 1) + delta.index

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self._created,
            "model": self.fields.model,
        }
