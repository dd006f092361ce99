"""Answers of /v1/messages."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from kvreclaim.engine.api.exports import Retention
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.client import RequestStream
from kvreclaim.engine.serving.core import OutputDelta, Update
from kvreclaim.parsers.formats import Splitter
from kvreclaim.parsers.json_value import json_so_far, json_value
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, ToolCall, merged
from kvreclaim.server.anthropic.fields import TTL_S, MessageRequest
from kvreclaim.server.base.fields import kv_cache_usage, reasoning_tokens
from kvreclaim.server.base.identity import answer_id
from kvreclaim.server.base.vocabulary import Continuation
from kvreclaim.server.http.events import event
from kvreclaim.server.shared.calls import format_of, is_structured_only
from kvreclaim.server.shared.service import Service, check_update


def content_blocks(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    return [_block(part) for part in merged(pieces)]


class BlockEvents:
    """Content blocks as events: each block starts, is filled and stops before the next one."""

    def __init__(self) -> None:
        self._index = 0
        self._open: type[Piece] | None = None

    def write(self, pieces: Iterable[Piece]) -> list[bytes]:
        events: list[bytes] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    events += self._begin(Text, {"type": "text", "text": ""})
                    events.append(self._delta({"type": "text_delta", "text": text}))
                case Reasoning(text):
                    events += self._begin(Reasoning, _block(Reasoning("")))
                    events.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case CallBegin(name, call_id):
                    events += [*self.end(), *self._begin(CallBegin, _block(ToolCall(name, "{}", call_id)))]
                case Arguments(text):
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case CallEnd():
                    events += self.end()
        return events

    def end(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        self._index += 1
        return [_block_event("content_block_stop", self._index - 1)]

    def _begin(self, kind: type[Piece], block: dict[str, Any]) -> list[bytes]:
        """Start a block, unless one of this kind is open."""
        if self._open is kind:
            return []
        ended = self.end()
        self._open = kind
        return [*ended, _block_event("content_block_start", self._index, content_block=block)]

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _block_event("content_block_delta", self._index, delta=delta)


def stop_of(
    delta: OutputDelta, metrics: RequestMetrics, max_tokens: int, num_calls: int
) -> dict[str, str | None]:
    """Reason for which an output ended.

    A server that shuts down pauses the turn: the client sends it back, and another server continues it.
    """
    sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    if sequence is not None:
        reason = "stop_sequence"
    elif delta.finish_reason == "length":
        full = metrics.num_generated_tokens < max_tokens
        reason = "model_context_window_exceeded" if full else "max_tokens"
    elif delta.finish_reason == "abort":
        reason = "pause_turn"
    else:
        reason = "tool_use" if num_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _block(part: Text | Reasoning | ToolCall) -> dict[str, Any]:
    """signature: empty, because it is never verified"""
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Reasoning(text):
            return {"type": "thinking", "thinking": text, "signature": ""}
        case ToolCall(name, arguments, call_id):
            made = call_id or f"toolu_{uuid.uuid4().hex}"
            given = json_so_far(arguments) if part.is_cut else json_value(arguments)
            return {"type": "tool_use", "id": made, "name": name, "input": given}


def _block_event(name: str, index: int, **more: Any) -> bytes:
    return event({"type": name, "index": index, **more}, name)


ROUTE = "/v1/messages"
PING_S = 10.0
"""Seconds of silence before a stream sends a ping, so that proxies do not close it."""
PING = event({"type": "ping"}, "ping")


class AnthropicResponse:
    """A validated request to /v1/messages."""

    def __init__(self, body: MessageRequest, service: Service, request_id: str, prompt: RequestSpec) -> None:
        self.body = body
        self.service = service
        self.request_id = request_id
        self.prompt = prompt
        one_call = body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use)
        form = format_of(body.offer, service.output_format)
        self.splitter = form.splitter(prompt.prompt_token_ids, body.offered, one_call=one_call)
        if is_structured_only(prompt):
            self.splitter = Splitter()
        is_prefilled = body.messages[-1].role == "assistant"
        self._prefill = Continuation(service.vocabulary, prompt.prompt_token_ids) if is_prefilled else None

    async def message(self) -> dict[str, Any]:
        """Return the whole answer. Raises: ApiError 500 if the request failed."""
        async with self.service.submit(self.request_id, [self.prompt]) as (stream,):
            update = await stream.rest()
            check_update(stream, update)
        pieces = self._pieces(update)
        return {
            **self._head(),
            "content": content_blocks(pieces),
            **self._stop(update),
            "usage": whole_usage(_metrics(update), self.prompt.retention, self._block_size),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Stream the answer. Raises: ApiError 500 if the request failed."""
        blocks, begun, last_sent = BlockEvents(), False, asyncio.get_running_loop().time()
        async with (
            self.service.submit(self.request_id, [self.prompt]) as (stream,),
            aclosing(_updates(stream)) as updates,
        ):
            async for update in updates:
                now = asyncio.get_running_loop().time()
                if update is None:
                    last_sent = now
                    yield PING
                    continue
                chunks = [] if begun else [self._message_start(update)]
                chunks += blocks.write(self._pieces(update))
                if update.finished:
                    chunks += [*blocks.end(), self._message_delta(update), _MESSAGE_STOP]
                begun = True
                if not chunks and now - last_sent >= PING_S:
                    chunks = [PING]
                if chunks:
                    last_sent = now
                    yield b"".join(chunks)

    @property
    def _block_size(self) -> int:
        return self.service.engine.served.block_size

    def _head(self) -> dict[str, Any]:
        return {
            "id": answer_id(self.request_id, ROUTE),
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
        }

    def _pieces(self, update: Update) -> list[Piece]:
        return self.splitter.take(self._text(_delta(update)), last=update.finished)

    def _text(self, delta: OutputDelta) -> str:
        """Return the new text, which continues a prefill if there is one."""
        return delta.text if self._prefill is None else self._prefill.take(delta.token_ids, delta.text)

    def _stop(self, update: Update) -> dict[str, str | None]:
        metrics, num_calls = _metrics(update), self.splitter.num_calls
        return stop_of(_delta(update), metrics, self.body.max_tokens, num_calls)

    def _message_start(self, update: Update) -> bytes:
        """Sent after the first token: the cache hits are unknown before."""
        metrics = _metrics(update)
        usage = input_usage(metrics, self.prompt.retention, self._block_size)
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "output_tokens": metrics.num_generated_tokens},
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def _message_delta(self, update: Update) -> bytes:
        usage = whole_usage(_metrics(update), self.prompt.retention, self._block_size)
        data = {"type": "message_delta", "delta": self._stop(update), "usage": usage}
        return event(data, "message_delta")


_MESSAGE_STOP = event({"type": "message_stop"}, "message_stop")


async def _updates(stream: RequestStream) -> AsyncGenerator[Update | None, None]:
    """Yield every update, and None after a silence. Raises: ApiError 500 if the request failed."""
    finished = False
    while not finished:
        try:
            async with asyncio.timeout(PING_S):
                update = await stream.next()
        except TimeoutError:
            yield None
            continue
        check_update(stream, update)
        finished = update.finished
        yield update


def _delta(update: Update) -> OutputDelta:
    """Delta of the only output; empty if it ended before its first token."""
    return update.deltas[0]


def _metrics(update: Update) -> RequestMetrics:
    assert update.metrics is not None, "the first update and the last one have metrics"
    return update.metrics


def input_usage(metrics: RequestMetrics, breakpoints: Sequence[Retention], block_size: int) -> dict[str, Any]:
    """Three counts that sum to the prompt.

    read:     tokens with K/V from the prefix cache
    creation: tokens after these, up to the last breakpoint, in whole blocks that entered the prefix index;
              by the longest TTL that covers them. Excludes blocks that were already indexed
    input:    all other tokens
    """
    read = metrics.num_cached_tokens

    def created(points: Sequence[Retention]) -> int:
        reach = max((point.num_tokens // block_size * block_size for point in points), default=0)
        return max(0, min(reach, metrics.num_indexed_tokens) - read - metrics.num_repeated_tokens)

    creation = created(breakpoints)
    longer = created([point for point in breakpoints if point.ttl_s == TTL_S["1h"]])
    return {
        "input_tokens": metrics.num_prompt_tokens - read - creation,
        "cache_creation_input_tokens": creation,
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": creation - longer,
            "ephemeral_1h_input_tokens": longer,
        },
    }


def whole_usage(metrics: RequestMetrics, breakpoints: Sequence[Retention], block_size: int) -> dict[str, Any]:
    """Final usage: input, output, and the effect of compression."""
    usage = input_usage(metrics, breakpoints, block_size)
    usage["output_tokens"] = metrics.num_generated_tokens
    if (reasoning := reasoning_tokens([metrics])) is not None:
        usage["output_tokens_details"] = {"thinking_tokens": reasoning}
    return {**usage, "kv_cache": kv_cache_usage([metrics])}
