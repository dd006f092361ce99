"""Answers of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.core import Update
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, ToolCall, merged
from kvreclaim.server.base.identity import answer_id, request_id_of
from kvreclaim.server.http.events import answer_json, error_of, event, json_of, stream_events
from kvreclaim.server.openai.answer import REPORT_SIZE
from kvreclaim.server.openai.chat import ChatAnswer
from kvreclaim.server.responses.head import failure, head, outcome_of, response_usage
from kvreclaim.server.responses.output import Event, OutputItems
from kvreclaim.server.responses.store import Kept, ResponseStore
from kvreclaim.server.responses.token_roles import TextTokens
from kvreclaim.server.responses.translate import Translated, own_names
from kvreclaim.server.shared.service import Service, check_update

ROUTE = "/v1/responses"


class ResponseAnswer:
    """The answer to a validated request: whole, or as events."""

    def __init__(
        self, turn: Translated, service: Service, store: ResponseStore, request: Request, prompt: RequestSpec
    ) -> None:
        self.turn = turn
        self.service = service
        self.store = store
        self.request = request
        self.prompt = prompt
        self.request_id = request_id_of(request.scope)
        self.chat = ChatAnswer(turn.chat, service, self.request_id, [prompt])
        self.texts = TextTokens(self.chat.splitter(), self.chat.vocabulary, whole=not turn.body.stream)
        response_id = answer_id(self.request_id, ROUTE)
        self.output = OutputItems(response_id)
        self.response = head(response_id, turn.body, prompt.params)
        self._num_events = 0

    async def respond(self) -> Response:
        if self.turn.body.stream:
            return await stream_events(self._events(), self.request)
        return await answer_json(self._whole(), self.request)

    async def _whole(self) -> bytes:
        """Raises: ApiError, 500 if the request failed."""
        with own_names(self.turn.places):
            async with self.service.submit(self.request_id, [self.prompt]) as (stream,):
                update = await stream.rest()
                check_update(stream, update)

        def write() -> bytes:
            self._take(update)
            return json_of(self.response)

        return await self._write_json(write, update)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Raises: ApiError for an error before the first event; a later error is the last event."""
        with own_names(self.turn.places):
            async with self.service.submit(self.request_id, [self.prompt]) as (stream,):
                yield self._written(self._about("created"), self._about("in_progress"))
                try:
                    async for update in stream:
                        check_update(stream, update)
                        work = partial(self._news, update)
                        if chunks := await self._write_json(work, update):
                            yield chunks
                except Exception as error:
                    sent = error_of(error, self.request.scope)
                    failed = failure(sent.message, "invalid_prompt" if sent.status == 400 else "server_error")
                    ended = self.output.end("incomplete")
                    self.response |= failed | {"output": self.output.items, "store": False}
                    yield self._written(*ended, self._about("failed"))

    def _news(self, update: Update) -> bytes:
        events = self._take(update)
        if update.finished:
            events.append(self._about(self.response["status"]))
        return self._written(*events)

    def _take(self, update: Update) -> list[Event]:
        """Process an update; at the end, complete and store the response."""
        delta = update.deltas[0]
        pieces = self.chat.split(0, delta)
        about = self.chat.about(0, delta)
        if about["logprobs"] is not None:
            entries = about["logprobs"]["content"]
            for message, logprobs in self.texts.of_messages(delta.token_ids, entries, last=update.finished):
                self.output.logprobs[message] += logprobs
        events = self.output.write(pieces if self.turn.body.stream else _again(pieces))
        if update.finished:
            assert update.metrics is not None, "the last update has metrics"
            self.response |= outcome_of(about["finish_reason"])
            events += self.output.end_all(complete=self.response["status"] == "completed")
            self.response |= {
                "output": self.output.items,
                "usage": response_usage([update.metrics]),
            }
            kept = self.turn.body.kept and self.response["status"] != "failed"
            self.response["store"] = kept and self._keep()
        return events

    def _keep(self) -> bool:
        """Store the response. Returns: whether it was stored."""
        kept = Kept(json_of({"items": self.turn.items}), json_of(self.response))
        return self.store.put(self.prompt.tenant, self.response["id"], kept)

    def _about(self, kind: str) -> Event:
        return {"type": f"response.{kind}", "response": self.response}

    def _written(self, *events: Event) -> bytes:
        written = []
        for each in events:
            data = {**each, "sequence_number": self._num_events}
            self._num_events += 1
            written.append(event(json_of(data).decode(), each["type"]))
        return b"".join(written)

    async def _write_json(self, work: Any, update: Update) -> bytes:
        """Encode JSON in a thread if it is long, or the last update, which is stored as well."""
        tokens = sum(len(delta.token_ids) for delta in update.deltas.values())
        size = tokens * (1 + (self.prompt.params.logprobs or 0)) * REPORT_SIZE
        written: bytes = await self.service.workers.run(
            self.prompt.tenant, work, size=None if update.finished else size
        )
        return written


def _again(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """Pieces of a whole output, with invalid calls as text."""
    for part in merged(pieces):
        if isinstance(part, ToolCall):
            yield CallBegin(part.name, part.id)
            yield Arguments(part.arguments)
            yield CallEnd("" if part.is_cut else None, part.is_cut)
        else:
            yield part
