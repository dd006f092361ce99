"""Answers of the Responses API."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.core import Update
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, ToolCall, merged
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.server.base.fields import reasoning_tokens, usage_of
from kvreclaim.server.base.identity import answer_id, request_id_of
from kvreclaim.server.http.events import answer_json, error_of, event, json_of, stream_events
from kvreclaim.server.openai.answer import REPORT_SIZE
from kvreclaim.server.openai.chat import ChatAnswer
from kvreclaim.server.responses.fields import ResponsesRequest
from kvreclaim.server.responses.items import RESPONSE_PREFIX, Item, new_item
from kvreclaim.server.responses.store import Kept, ResponseStore
from kvreclaim.server.responses.token_roles import Logprobs, TextTokens
from kvreclaim.server.responses.translate import Translated, own_names
from kvreclaim.server.shared.service import Service, check_update

Event = dict[str, Any]


class OutputItems:
    """Writes pieces into items: each starts, is filled and ends before the next one.

    response_id: the answer's; part of its items' ids
    items:    finished items
    logprobs: of future texts, by the index of their message
    """

    def __init__(self, response_id: str) -> None:
        self._own = response_id.removeprefix(RESPONSE_PREFIX)
        self.items: list[Item] = []
        self._item: Item | None = None
        self.logprobs: defaultdict[int, Logprobs] = defaultdict(list)
        self._texts: list[str] = []
        self._logprobs: Logprobs = []
        self._num_messages = 0

    def write(self, pieces: Iterable[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Text(text) if text:
                    events += self._begin("message", role="assistant", content=[])
                    logprobs = self.logprobs.pop(self._num_messages - 1, [])
                    self._logprobs += logprobs
                    events.append(self._delta("output_text", text, content_index=0, logprobs=logprobs))
                case Reasoning(text) if text:
                    events += self._begin("reasoning", summary=[], content=[])
                    events.append(self._delta("reasoning_text", text, content_index=0))
                case CallBegin(name, call_id):
                    called = call_id or f"call_{uuid.uuid4().hex}"
                    events += self.end()
                    events += self._begin("function_call", call_id=called, name=name, arguments="")
                case Arguments(text):
                    events.append(self._delta("function_call_arguments", text))
                case CallEnd(broken):
                    events += self.end("completed" if broken is None else "incomplete")
        return events

    def end(self, status: str = "completed") -> list[Event]:
        item = self._item
        if item is None:
            return []
        text, self._item = "".join(self._texts), None
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._about(item, "function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            part = item["content"][0] | {"text": text}
            logprobs = {}
            if item["type"] == "message":
                self._logprobs += self.logprobs.pop(self._num_messages - 1, [])
                part["logprobs"] = self._logprobs
                logprobs = {"logprobs": self._logprobs}
            item["content"] = [part]
            done = self._about(item, f"{part['type']}.done", content_index=0, text=text, **logprobs)
            events = [done, self._about(item, "content_part.done", content_index=0, part=part)]
        self.items.append(item)
        return [*events, self._of_item("output_item.done", item, len(self.items) - 1)]

    def end_all(self, *, complete: bool) -> list[Event]:
        """End the output, which has at least one item. complete: otherwise its last item is incomplete."""
        empty = not self.items and self._item is None
        events = self._begin("message", role="assistant", content=[]) if empty else []
        return events + self.end("completed" if complete else "incomplete")

    def _begin(self, kind: str, **more: Any) -> list[Event]:
        """Start an item, unless one of this kind is open."""
        if self._item is not None and self._item["type"] == kind:
            return []
        ended = self.end()
        item = self._item = new_item(kind, "in_progress", f"{self._own}_{len(self.items)}", **more)
        self._texts = []
        events = [*ended, self._of_item("output_item.added", dict(item), len(self.items))]
        if kind != "function_call":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                self._logprobs = []
                self._num_messages += 1
            item["content"] = [part]
            events.append(self._about(item, "content_part.added", content_index=0, part=part))
        return events

    def _delta(self, kind: str, text: str, **more: Any) -> Event:
        assert self._item is not None, f"a {kind} comes in an item"
        self._texts.append(text)
        return self._about(self._item, f"{kind}.delta", delta=text, **more)

    def _about(self, item: Item, kind: str, **more: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": item["id"], "output_index": len(self.items), **more}

    def _of_item(self, kind: str, item: Item, index: int) -> Event:
        return {"type": f"response.{kind}", "output_index": index, "item": item}


SHUT_DOWN = "the server shut down before the answer was complete; send the request again."


def head(response_id: str, body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Return the response before its first output."""
    choice, reasoning, text = body.tool_choice, body.reasoning, body.text
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        **outcome_of(None),
        "background": body.background is True,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.kept,
        "temperature": params.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": choice.model_dump() if choice and not isinstance(choice, str) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def outcome_of(finish_reason: str | None) -> dict[str, Any]:
    """Status and its reason, by chat's finish reason; None: still running."""
    outcome: dict[str, Any] = {"status": "in_progress"}
    outcome |= {"completed_at": None, "error": None, "incomplete_details": None}
    match finish_reason:
        case "stop" | "tool_calls":
            outcome |= {"status": "completed", "completed_at": int(time.time())}
        case "length":
            outcome |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        case "abort":
            outcome |= failure(SHUT_DOWN)
    return outcome


def failure(message: str, code: str = "server_error") -> dict[str, Any]:
    return {"status": "failed", "error": {"code": code, "message": message}}


def response_usage(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Return chat's usage under this API's names.

    cache_write_tokens: prompt tokens that entered the prefix cache
    """
    usage = usage_of(metrics)
    written = sum(m.num_indexed_tokens - m.num_cached_tokens - m.num_repeated_tokens for m in metrics)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            **usage["prompt_tokens_details"],
            "cache_write_tokens": max(0, written),
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens(metrics) or 0},
        "total_tokens": usage["total_tokens"],
        "kv_cache": usage["kv_cache"],
    }


ROUTE = "/v1/responses"


class ResponseAnswer:
    """The answer to a validated request: whole, or as events.

    sent: events of a background response, by sequence number
    """

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
        self.texts = TextTokens(self.chat.splitter(), self.chat.vocabulary, whole=not turn.body.in_pieces)
        response_id = answer_id(self.request_id, ROUTE)
        self.output = OutputItems(response_id)
        self.response = head(response_id, turn.body, prompt.params)
        self.sent: list[bytes] = []
        self._num_events = 0

    async def respond(self) -> Response:
        if self.turn.body.stream:
            return await stream_events(self.events(), self.request)
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

    async def cancel(self) -> None:
        """End with the output so far, and store it, unless the last update came first."""

        def write() -> None:
            if self.response["status"] != "in_progress":
                return
            ended = self.output.end("incomplete")
            self.response |= {"status": "cancelled", "output": self.output.items}
            self.response["store"] = self._keep()
            self._written(*ended, self._about("incomplete"))

        await self.service.workers.run(self.prompt.tenant, write)

    async def events(self) -> AsyncGenerator[bytes, None]:
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
        events = self.output.write(pieces if self.turn.body.in_pieces else _again(pieces))
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
        if self.turn.body.background:
            self.sent += written
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
