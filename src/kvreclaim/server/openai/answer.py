"""Produces the answer to a validated request: whole, or as events."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, TypeVar

from pydantic_core import to_json
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.client import RequestStream
from kvreclaim.engine.serving.core import OutputDelta, Update
from kvreclaim.server.base.fields import token_usage, usage_of
from kvreclaim.server.base.identity import answer_id
from kvreclaim.server.base.vocabulary import TokenPlaces
from kvreclaim.server.http.events import PIECE, answer_json, event, json_of, stream_events
from kvreclaim.server.openai.logprobs import prompt_logprobs
from kvreclaim.server.openai.prompts import GenerationFields, StreamOptions
from kvreclaim.server.shared.service import Service, check_update

T = TypeVar("T")
REPORT_SIZE = 8
"""Characters of text that take as long to encode as a token or a log-probability."""
Updates = AsyncGenerator[tuple[int, Update], None]


class OpenAIResponse(ABC):
    """One HTTP request's way through the engine.

    kind, chunk_kind: `object` of the whole answer and of a chunk
    places:           positions of each output's reported tokens, for their log-probabilities
    """

    route: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, fields: GenerationFields, service: Service, request_id: str, prompts: list[RequestSpec]
    ) -> None:
        self.fields = fields
        self.service = service
        self.request_id = request_id
        self.response_id = answer_id(request_id, self.route)
        self.prompts = prompts
        self.options = fields.stream_options or StreamOptions()
        skips = prompts[0].params.skip_special_tokens
        self.vocabulary = service.vocabulary if skips else service.whole_vocabulary
        self.places = defaultdict[int, TokenPlaces](lambda: TokenPlaces(self.vocabulary))
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
    def choice(self, index: int, delta: OutputDelta, stream: RequestStream) -> dict[str, Any]:
        """Return one whole output. index: among the outputs of all prompts."""

    @abstractmethod
    def chunk_choices(
        self, index: int, delta: OutputDelta, stream: RequestStream, *, first: bool
    ) -> list[dict[str, Any]]:
        """Return the chunks for an output's update; empty while there is nothing to send."""

    def extras(self, stream: RequestStream) -> dict[str, Any]:
        """Return fields that a whole answer or an output's first chunk has, if there is one prompt."""
        return {}

    def of_prompt(self, stream: RequestStream) -> dict[str, Any]:
        """Return the requested fields about the prompt."""
        found: dict[str, Any] = {}
        if self.fields.prompt_logprobs is not None:
            assert stream.prompt_logprobs is not None, f"{stream.request_id} lacks its prompt_logprobs"
            tokens, places = stream.new.prompt_token_ids, TokenPlaces(self.vocabulary)
            found["prompt_logprobs"] = prompt_logprobs(tokens, stream.prompt_logprobs, places)
        if self.fields.return_token_ids:
            found["prompt_token_ids"] = stream.new.prompt_token_ids
        return found

    def take(self, delta: OutputDelta) -> OutputDelta:
        """Adjust an update before it is reported."""
        return delta

    def usage(self) -> dict[str, Any]:
        """Return the final usage of the whole answer."""
        return usage_of([self._metrics[place] for place in sorted(self._metrics)])

    async def _whole(self) -> bytes:
        """Write the answer of each prompt once it has ended; a long one in a thread."""
        choices: list[bytes] = []
        async with self.service.submit(self.request_id, self.prompts) as streams:
            for place, stream in enumerate(streams):
                update = await stream.rest()
                check_update(stream, update)
                assert update.metrics is not None, "the last update has metrics"
                self._metrics[place] = update.metrics
                await asyncio.sleep(0)  # yields to other tasks between many short outputs
                choices += await self._write_json(
                    partial(self._choices, place, update, stream), update, first=True
                )
            more = await self._write_json(lambda: json_of(self.extras(streams[0])), update, first=True)
        head, usage = to_json(self._head(self.kind)), to_json({"usage": self.usage()})
        joined = b'"choices":[' + b",".join(choices) + b"]"
        return b",".join([head[:-1], joined, *([more[1:-1]] if len(more) > 2 else []), usage[1:]])

    def _choices(self, place: int, update: Update, stream: RequestStream) -> list[bytes]:
        deltas = sorted(update.deltas.values(), key=lambda delta: delta.index)
        return [json_of(self.choice(self._index(place, delta), self.take(delta), stream)) for delta in deltas]

    async def _write_json(self, work: Callable[[], T], update: Update, *, first: bool) -> T:
        """Encode an update, in a thread if it is long. first: includes the prompt."""
        tokens = sum(len(delta.token_ids) for delta in update.deltas.values())
        size = tokens * (1 + (self.prompts[0].params.logprobs or 0))
        num_logprobs = self.prompts[0].params.prompt_logprobs
        if first and num_logprobs is not None:
            size += max(len(prompt.prompt_token_ids) for prompt in self.prompts) * (1 + num_logprobs)
        return await self.service.workers.run(self.prompts[0].tenant, work, size=size * REPORT_SIZE)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        submitted = self.service.submit(self.request_id, self.prompts)
        async with submitted as streams, aclosing(_updates(streams)) as news:
            async for place, update in news:
                if update.metrics is not None:
                    self._metrics[place] = update.metrics
                first = place * (self.fields.n or 1) not in self._begun
                work = partial(self._chunks, place, update, streams[place])
                if chunks := await self._write_json(work, update, first=first):
                    yield chunks
        if self.options.include_usage:
            yield event({**self._head(self.chunk_kind), "choices": [], "usage": self.usage()})
        yield event("[DONE]")

    def _chunks(self, place: int, update: Update, stream: RequestStream) -> bytes:
        return b"".join(
            self._chunk(choice, more)
            for delta in update.deltas.values()
            for choice, more in self._news(self._index(place, delta), self.take(delta), stream)
        )

    def _news(
        self, index: int, delta: OutputDelta, stream: RequestStream
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the choices of an output's next chunks, each with the fields next to `choices`."""
        first = index not in self._begun
        self._begun.add(index)
        self._num_generated += len(delta.token_ids)
        for choice in self.chunk_choices(index, delta, stream, first=first):
            more = self.extras(stream) if first else {}
            first = False
            if self.options.continuous_usage_stats:
                more["usage"] = token_usage(list(self._metrics.values()), self._num_generated)
            elif self.options.include_usage:
                more["usage"] = None
            yield choice, more

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        """Encode a chunk as `event` would; the common beginning is encoded once."""
        if self._chunk_head is None:
            self._chunk_head = b"data: " + to_json(self._head(self.chunk_kind))[:-1] + b',"choices":['
        tail = b"]," + to_json(more)[1:] if more else b"]}"
        long = len(choice.get("token_ids") or ()) > PIECE or choice["logprobs"] is not None
        return self._chunk_head + (json_of if long else to_json)(choice) + tail + b"\n\n"

    def _index(self, place: int, delta: OutputDelta) -> int:
        return place * (self.fields.n or 1) + delta.index

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self._created,
            "model": self.fields.model,
        }


def scores_of(delta: OutputDelta) -> dict[str, float]:
    if delta.scores is None:
        return {}
    cumulative, score = delta.scores
    return {"cumulative_logprob": cumulative, "sequences_scores": score}


def _updates(streams: Sequence[RequestStream]) -> Updates:
    """Yield updates, each with the index of its stream. Raises: ApiError 500 if a request failed."""
    return _one(streams[0]) if len(streams) == 1 else _merged(streams)


async def _one(stream: RequestStream) -> Updates:
    async for update in stream:
        check_update(stream, update)
        yield 0, update


async def _merged(streams: Sequence[RequestStream]) -> Updates:
    waiting = {asyncio.ensure_future(stream.next()): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place, update = waiting.pop(task), task.result()
                check_update(streams[place], update)
                if not update.finished:
                    waiting[asyncio.ensure_future(streams[place].next())] = place
                yield place, update
    finally:
        for task in waiting:
            task.cancel()
